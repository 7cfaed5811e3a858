"""File names: `<id>` is ready, `<id>.<expiry>` is leased, `<id>.new` is being written; nothing else is a message."""

from __future__ import annotations

import re

import msgspec

__all__ = ["Unit", "leased_name", "parse"]

# Canonical decimals only: the released implementation writes a name back from its number.
_NAME = re.compile(r"(0|[1-9][0-9]{0,19})(?:\.(0|[1-9][0-9]{0,19}))?", re.ASCII)
# Ids below this are milliseconds, others microseconds: the year 5138, and the year 1973.
_MILLISECONDS_BELOW = 10**14


def parse(name: str) -> tuple[int, int | None] | None:
    """Return the id and the expiry (None: ready) of a message's file name; None for any other name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    expiry = found[2]
    return int(found[1]), None if expiry is None else int(expiry)


def leased_name(number: int, expiry: int) -> str:
    """Return the name of a leased message."""
    return f"{number}.{expiry}"


class Unit(msgspec.Struct, frozen=True):
    """The unit of a queue's ids and expiries."""

    per_second: int
    # Expiries of one process differ in this much of their last digits, so that no two leases have the same name.
    spread: int

    def ticks(self, seconds: float) -> int:
        """Convert Unix seconds to this unit."""
        return round(seconds * self.per_second)

    def seconds(self, ticks: int) -> float:
        """Convert an expiry to Unix seconds."""
        return ticks / self.per_second

    @staticmethod
    def enqueued_at(number: int) -> float:
        """Return when an id was made, in Unix seconds. The id may have either unit."""
        return number / (1_000 if number < _MILLISECONDS_BELOW else 1_000_000)
