"""The interface of history stores. A backend has one, `Backend.history`, which callers use directly."""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from qworker.duration import format_duration, parse_duration
from qworker.errors import InvalidURL, UsageError
from qworker.history.batch import EventBatch, to_batches
from qworker.history.event import Event
from qworker.names import printable
from qworker.size import format_size, parse_size
from qworker.url import BackendURL

__all__ = [
    "HISTORY_OPTIONS",
    "NO_HISTORY",
    "HistoryOptions",
    "HistoryStore",
    "NoHistory",
    "parse_position",
    "sort_by_time",
]

# The history's options of a URL, for `BackendURL.only`.
HISTORY_OPTIONS = frozenset({"history", "keep_history"})

_PAGE = 1000
_SIZE = 512 << 20


class HistoryStore(abc.ABC):
    """Append-only logs of events, which belong to one event loop.

    Attributes:
        enabled: False if this process records nothing. Events that other processes record, or recorded earlier, can
            still be read.
    """

    enabled: bool = True

    @abc.abstractmethod
    def append(self, batches: Sequence[EventBatch]) -> None:
        """Keep events.

        The worker's loops call it on the loop's thread, so it must be cheap: events are buffered and not synced. No
        message depends on them. It never raises because of the store. If the store is full or broken, that is logged
        once, and events are dropped until the store works again.
        """

    @abc.abstractmethod
    async def logs(self) -> list[str]:
        """Return the names of the logs, sorted. Each can be read on its own, and all in parallel."""

    async def logs_of(self, queues: Sequence[str]) -> list[str]:
        """Return the names of the logs that can have events of some queues. They need not exist."""
        del queues
        return await self.logs()

    @abc.abstractmethod
    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Read events of one log, starting after a position.

        The events of one message are in order within a log. If several workers had a message, its events are in several
        logs. Damaged records are skipped.

        Args:
            log: One of `logs`. A log that does not exist has no events.
            after: A position that an earlier `read` returned. None: the beginning of what is kept.
            limit: The largest number of events to return, at least 1.

        Returns:
            The events (none if there are no more at present), and the position to continue from. Positions are opaque
            and stable. Within a log they are ordered as text.

        Raises:
            UsageError: `after` is not a position.
        """

    async def read_batches(self, log: str, after: str | None, limit: int) -> tuple[list[EventBatch], str | None]:
        """Read a log in columns, without making an event of each transition.

        Args:
            log: One of `logs`. A log that does not exist has no batches.
            after: A position that `read_batches`, `read` or `last_position` returned. None: the beginning. If it lies
                inside a record, the whole record is returned again.
            limit: The largest number of batches to return, at least 1. A store without records in columns returns the
                batches of so many events.

        Returns:
            The batches (none if there are no more at present), and the position to continue from.

        Raises:
            UsageError: `after` is not a position.
        """
        events, following = await self.read(log, after, limit)
        return to_batches(events), following

    async def read_back(
        self, log: str, before: str | None, limit: int, needles: Collection[bytes] = ()
    ) -> tuple[list[EventBatch], str | None]:
        """Read a log backwards, in columns.

        Args:
            log: One of `logs`. A log that does not exist has no batches.
            before: A position that `read_back` or `last_position` returned. None: the end of the log.
            limit: The largest number of records to look at, at least 1.
            needles: Parts of the stored form. A store may leave out records without one of them, which it need not
                decode. The oldest record is always returned, so that it is known how far back the records go.

        Returns:
            The batches, the newest first, and the position to continue from. None: this was the beginning.

        Raises:
            UsageError: `before` is not a position.
        """
        del needles
        found: list[EventBatch] = []
        start: str | None = None
        place: str | None = None
        while True:
            page, following = await self.read_batches(log, place, limit)
            if not page or following is None:
                return found[::-1], start
            if before is not None and following > before:
                # The pages of an earlier call began elsewhere, because retention has removed some records.
                if limit == 1:
                    return found[::-1], start
                limit //= 2
                continue
            found, start, place = page, place, following
            if following == before:
                return found[::-1], start

    @abc.abstractmethod
    async def delete_before(self, log: str, position: str) -> None:
        """Allow the store to remove what lies before a position.

        The store decides when, and whether it removes all of it.

        Raises:
            UsageError: `position` is not a position.
        """

    async def last_position(self, log: str) -> str | None:
        """Return the position after the last event, or None if the log is empty."""
        after: str | None = None
        while True:
            page, after = await self.read(log, after, _PAGE)
            if not page:
                return after

    async def last_written(self, log: str) -> float | None:
        """Return Unix seconds: all events of the log were recorded then or earlier. None: it is not known."""
        del log
        return None

    async def for_message(self, queue: str, message_id: str) -> list[Event]:
        """Return all known events of one message, by time. The message may be gone from the store."""
        found: list[Event] = []
        for log in await self.logs():
            after: str | None = None
            while True:
                page, after = await self.read(log, after, _PAGE)
                if not page:
                    break
                found += [event for event in page if event.id == message_id and event.queue == queue]
        return sort_by_time(found)

    @abc.abstractmethod
    def describe_retention(self) -> str:
        """Return how long events are kept, as text for people."""

    @property
    def retention(self) -> Mapping[str, str]:
        """The history's entry of `QueueStats.retention`."""
        return {"history": self.describe_retention()} if self.enabled else {}

    async def aclose(self) -> None:
        """Release everything, after what was appended is kept. Idempotent; a later call opens it again."""
        return


class NoHistory(HistoryStore):
    """A history that keeps nothing."""

    enabled = False

    def append(self, batches: Sequence[EventBatch]) -> None:
        """Drop the events."""

    async def logs(self) -> list[str]:
        """Return no logs."""
        return []

    async def read(self, log: str, after: str | None, limit: int) -> tuple[list[Event], str | None]:
        """Return no events."""
        return [], after

    async def delete_before(self, log: str, position: str) -> None:
        """Do nothing."""

    def describe_retention(self) -> str:
        """Return that nothing is kept."""
        return "not kept"


NO_HISTORY = NoHistory()


def parse_position(text: str, fields: int) -> list[int]:
    """Return the numbers of a position, which are joined by dashes.

    Raises:
        UsageError: It is not a position.
    """
    numbers = text.split("-")
    if len(numbers) != fields or not all(re.fullmatch(r"[0-9]{1,20}", number) for number in numbers):
        raise UsageError(f"{printable(text)!r} is not a position in a history")
    return [int(number) for number in numbers]


def sort_by_time(events: list[Event]) -> list[Event]:
    """Sort events of several logs by time. Events of the same moment stay in the order of their log."""
    return sorted(events, key=lambda event: event.at)


class HistoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL: `?history=0|1&keep_history=7d,512M`.

    Attributes:
        enabled: Whether events are recorded.
        age: Seconds for which events are kept.
        size: Bytes of events that are kept.
    """

    enabled: bool = True
    age: float = 7 * 86400.0
    size: int = _SIZE

    @classmethod
    def from_url(cls, url: BackendURL, *, default: bool, size: int = _SIZE) -> HistoryOptions:
        """Read the options of a URL.

        Args:
            url: The URL.
            default: Whether events are recorded if the URL does not say it.
            size: Bytes of events that are kept if the URL does not say it.

        Raises:
            InvalidURL: An option is not valid.
        """
        options = cls(enabled=url.boolean("history", default), size=size)
        for text in filter(None, url.options.get("keep_history", "").split(",")):
            try:
                options = _with_limit(options, text)
            except UsageError:
                raise InvalidURL(
                    f"{url.masked}: keep_history={text} is not valid: use an age such as 7d, a size such as 512M or 4G,"
                    " or both with a comma between them"
                ) from None
        return options

    def describe_retention(self) -> str:
        """Return how long events are kept, as text for people."""
        if not self.enabled:
            return NO_HISTORY.describe_retention()
        return f"kept for {format_duration(self.age)}, at most {format_size(self.size).removesuffix('iB')}"


def _with_limit(options: HistoryOptions, text: str) -> HistoryOptions:
    """Return the options with one limit, which is an age or a size.

    Raises:
        UsageError: It is neither. A bare number could be both.
    """
    if text[-1].isdigit():
        raise UsageError(f"{text!r} has no unit")
    if text[-1] in "KMGTB":
        return msgspec.structs.replace(options, size=parse_size(text, least=1 << 20))
    return msgspec.structs.replace(options, age=parse_duration(text, least=1.0))
