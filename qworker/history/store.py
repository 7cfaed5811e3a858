"""Where events are kept. A backend has one of these, and passes the calls of its contract on to it."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping, Sequence

import msgspec

from qworker.errors import InvalidURL, UsageError
from qworker.history.batch import EventBatch
from qworker.history.event import Event
from qworker.names import printable
from qworker.url import BackendURL

__all__ = [
    "HISTORY_OPTIONS",
    "NO_HISTORY",
    "HistoryOptions",
    "HistoryStore",
    "NoHistory",
    "in_order",
    "parsed_position",
]

# What a URL may say of the history: `BackendURL.only` has to know.
HISTORY_OPTIONS = frozenset({"history", "keep_history"})

_PAGE = 1000
_SIZE = 512 << 20
_AGE_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE_UNITS = {"M": 1 << 20, "G": 1 << 30}
_KEEP = re.compile(r"(\d{1,9})([mhdMG])")


class HistoryStore(abc.ABC):
    """Append-only logs of events. Belongs to one event loop."""

    # False: nothing is recorded, and nobody need try. What was recorded earlier, or by others, can be read all the same.
    enabled: bool = True

    @abc.abstractmethod
    def append(self, batches: Sequence[EventBatch]) -> None:
        """Keep events; cheap, on the loop's thread.

        Never raises because of the store: when it is full or broken that is logged once, and nothing is kept until it is well.
        """

    @abc.abstractmethod
    async def logs(self) -> list[str]:
        """The logs, which can be read in parallel; sorted."""

    @abc.abstractmethod
    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """See `Backend.read_history`."""

    @abc.abstractmethod
    async def delete_before(self, log: str, position: str) -> None:
        """See `Backend.forget_history`."""

    async def last_position(self, log: str) -> str | None:
        """The position after the last event of a part, for who wants to hear of what comes; None: it has no events."""
        after: str | None = None
        while True:
            page, after = await self.read(log, after, _PAGE)
            if not page:
                return after

    async def for_message(self, queue: str, message_id: str) -> list[Event]:
        """See `Backend.message_history`."""
        found: list[Event] = []
        for log in await self.logs():
            after: str | None = None
            while True:
                page, after = await self.read(log, after, _PAGE)
                if not page:
                    break
                found += [event for event in page if event.id == message_id and event.queue == queue]
        return in_order(found)

    @abc.abstractmethod
    def describe_retention(self) -> str:
        """For how long events are kept, for people."""

    @property
    def retention(self) -> Mapping[str, str]:
        """What `QueueStats.retention` says of it."""
        return {"history": self.describe_retention()} if self.enabled else {}

    async def aclose(self) -> None:
        """Let go of everything, after what was recorded is kept. Idempotent; the next call begins anew."""
        return


class NoHistory(HistoryStore):
    """Keeps nothing."""

    enabled = False

    def append(self, batches: Sequence[EventBatch]) -> None:
        """Keep nothing."""

    async def logs(self) -> list[str]:
        """None."""
        return []

    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Nothing."""
        return [], after

    async def delete_before(self, log: str, position: str) -> None:
        """Nothing to forget."""

    def describe_retention(self) -> str:
        """For people."""
        return "not kept"


NO_HISTORY = NoHistory()


def parsed_position(text: str, fields: int) -> list[int]:
    """The numbers of a position, which are joined by dashes.

    Raises:
        UsageError: it is none.
    """
    numbers = text.split("-")
    if len(numbers) != fields or not all(re.fullmatch(r"[0-9]{1,20}", number) for number in numbers):
        raise UsageError(f"{printable(text)!r} is no position in a history")
    return [int(number) for number in numbers]


def in_order(events: list[Event]) -> list[Event]:
    """Events of several parts by their time; those of one moment stay in the order of their part."""
    return sorted(events, key=lambda event: event.at)


class HistoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`?history=0|1&keep_history=7d,512M`."""

    enabled: bool = True
    # Seconds for which, and bytes of which, events are kept.
    age: float = 7 * 86400.0
    size: int = _SIZE

    @classmethod
    def from_url(cls, url: BackendURL, *, default: bool, size: int = _SIZE) -> HistoryOptions:
        """Read a URL's options; where it says nothing, there is a history if `default`, of at most `size` bytes.

        Raises:
            InvalidURL: one makes no sense.
        """
        options = cls(enabled=url.boolean("history", default), size=size)
        for text in filter(None, url.options.get("keep_history", "").split(",")):
            match = _KEEP.fullmatch(text)
            if match is None or int(match[1]) == 0:
                raise InvalidURL(
                    f"{url.masked}: keep_history is an age like 7d or 12h, a size like 512M or 4G, or both with a comma"
                    f" between them, not {text!r}"
                )
            if match[2] in _AGE_UNITS:
                options = msgspec.structs.replace(options, age=int(match[1]) * _AGE_UNITS[match[2]])
            else:
                options = msgspec.structs.replace(options, size=int(match[1]) * _SIZE_UNITS[match[2]])
        return options

    def describe_retention(self) -> str:
        """For people."""
        if not self.enabled:
            return NO_HISTORY.describe_retention()
        return f"kept for {_in_units(self.age, _AGE_UNITS)}, at most {_in_units(self.size, _SIZE_UNITS)}"


def _in_units(amount: float, units: dict[str, float] | dict[str, int]) -> str:
    """In the largest unit that needs no fraction."""
    unit, size = next((u, s) for u, s in reversed(units.items()) if amount % s == 0)
    return f"{amount / size:g}{unit}"
