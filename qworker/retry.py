"""When a failed message runs again: exponential backoff with full jitter, as a pure function.

Full jitter (a uniform draw below the exponential ceiling) spreads a herd of failures best; see "Exponential Backoff And
Jitter", M. Brooker, AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_BACKOFF", "Backoff"]


class Backoff(msgspec.Struct, frozen=True):
    """The delays of a task's retries."""

    # Seconds: the ceiling after the first failure.
    base: float = 1.0
    # Seconds: no ceiling is higher.
    limit: float = 300.0
    # How much the ceiling grows with each failure.
    factor: float = 2.0

    def ceiling(self, tries: int) -> float:
        """The longest delay in seconds after the failure number `tries` (the first is 1)."""
        exponent = max(tries, 1) - 1
        # 2.0 ** 1024 overflows; by then every limit is reached.
        return min(self.limit, self.base * self.factor ** min(exponent, 60))

    def delay(self, tries: int, draw: float) -> float:
        """The delay in seconds after the failure number `tries`, for a uniform `draw` from [0, 1)."""
        return self.ceiling(tries) * draw


DEFAULT_BACKOFF = Backoff()
