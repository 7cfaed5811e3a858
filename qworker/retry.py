"""When a failed message runs again: exponential backoff with full jitter, as a pure function.

Full jitter (a uniform draw below the exponential ceiling) spreads a herd of failures best; see "Exponential Backoff And
Jitter", M. Brooker, AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import msgspec

from qworker.errors import UsageError
from qworker.validation import number_of, shown

__all__ = ["DEFAULT_BACKOFF", "MOST_DELAY", "Backoff"]

# Seconds, ten years: a later time is not stored. The names and numbers of every backend have room for it.
MOST_DELAY = 10 * 365 * 86400.0


class Backoff(msgspec.Struct, frozen=True):
    """The delays of a task's retries.

    Attributes:
        initial: Seconds: the longest delay after the first failure.
        maximum: Seconds: no delay is longer.
        multiplier: How much the longest delay grows with each failure, at least 1.

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
        """The longest delay in seconds after the failure number `tries` (the first is 1)."""
        exponent = max(tries, 1) - 1
        # 2.0 ** 1024 overflows; by then every limit is reached.
        return min(self.maximum, self.initial * self.multiplier ** min(exponent, 60))

    def delay(self, tries: int, draw: float) -> float:
        """The delay in seconds after the failure number `tries`, for a uniform `draw` from [0, 1)."""
        return self.max_delay(tries) * draw


DEFAULT_BACKOFF = Backoff()
