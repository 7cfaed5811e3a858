"""The delays of retries: exponential backoff with full jitter, as a pure function.

Full jitter (a uniform draw below the exponential maximum) spreads simultaneous failures best. See "Exponential Backoff
And Jitter", M. Brooker, AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import msgspec

from qworker.errors import UsageError
from qworker.validation import number_of, shown

__all__ = ["DEFAULT_BACKOFF", "MOST_DELAY", "Backoff"]

# Seconds: ten years. Every backend can store a time that is this far away.
MOST_DELAY = 10 * 365 * 86400.0


class Backoff(msgspec.Struct, frozen=True):
    """The delays of a task's retries.

    Attributes:
        initial: The longest delay after the first failure, in seconds.
        maximum: The longest delay after any failure, in seconds.
        multiplier: The factor by which the longest delay grows with each failure, at least 1.

    Raises:
        UsageError: A field is not a number or is out of range.
    """

    initial: float = 1.0
    maximum: float = 300.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("initial", 0.0, MOST_DELAY),
            ("maximum", 0.0, MOST_DELAY),
            ("multiplier", 1.0, 1000.0),
        ):
            value = getattr(self, name)
            number = number_of(value)
            if not least <= number <= most:
                raise UsageError(
                    f"Backoff: {name} must be a number from {least:.0f} to {most:.0f} (got {shown(value)})"
                )
            msgspec.structs.force_setattr(self, name, number)

    def max_delay(self, tries: int) -> float:
        """Return the longest delay in seconds after failure number `tries`. The first failure is 1."""
        exponent = max(tries, 1) - 1
        # 2.0 ** 1024 overflows. Every maximum is reached before that.
        return min(self.maximum, self.initial * self.multiplier ** min(exponent, 60))

    def delay(self, tries: int, draw: float) -> float:
        """Return the delay in seconds after failure number `tries`, for a uniform `draw` from [0, 1)."""
        return self.max_delay(tries) * draw


DEFAULT_BACKOFF = Backoff()
