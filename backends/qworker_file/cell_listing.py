"""The listing of a group of cells that the pages of one iteration share.

Without it, each page would list the whole group, and an iteration would cost the square of the number of cells.
"""

from __future__ import annotations

import time

import msgspec

__all__ = ["MOST_LISTINGS", "CellListing"]

# The listings that a store keeps at most.
MOST_LISTINGS = 16
# Seconds for which a listing can be continued.
_LASTS = 10.0


class CellListing(msgspec.Struct):
    """The rest of a listing.

    Attributes:
        names: The names of cells, each with that of its file, the next one last.
        listed_at: Monotonic seconds of the listing.
        after: The last name of the page before.
    """

    names: list[tuple[str, str]]
    listed_at: float
    after: str = ""

    def continues(self, after: str) -> bool:
        """Return whether the page after a name can be read from it: a put of another process may be missing."""
        return self.after == after and time.monotonic() - self.listed_at < _LASTS
