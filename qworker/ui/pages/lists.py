"""Lists of messages of one queue, as a page or a program asks for them: a part of a state, or what matches a filter."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.datastructures import QueryParams

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.clock import Clock
from qworker.errors import UsageError
from qworker.failures.message_filter import MessageFilter
from qworker.message import Query, State, StoredMessage
from qworker.sampling import QueueSnapshot
from qworker.ui.access import Access
from qworker.ui.filters import read_filter
from qworker.ui.pages.rows import FRESH_S
from qworker.ui.pages.source import Source
from qworker.ui.text import search_text_of

__all__ = ["FILTERS", "MOST_SCANNED", "ListQuery", "MessageList", "read_list"]

# Messages that one search looks at, and the seconds after which it ends.
MOST_SCANNED = 20_000
_SECONDS = 2.0
# Messages after which a search looks at the clock, and lets others run.
_CHECK_EVERY = 200
# Ready messages above which a list of them shows only the ids that the sampler has seen.
_LISTED = 50_000
# The fields of a URL that choose messages.
FILTERS = ("task", "text", "error", "code", "group", "since", "until")


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What a list has.

    Attributes:
        state: The state of the messages.
        newest: Whether the last ones come first.
        after: The position of a message, after which the list begins. None: at the start.
        matching: The filter.
        text: A text that the body, the arguments or the error contains, in any case. Empty: any.
    """

    state: State = State.READY
    newest: bool = False
    after: str | None = None
    matching: MessageFilter = MessageFilter()
    text: str = ""

    @classmethod
    def of(cls, asked: QueryParams) -> ListQuery:
        """Return what the fields of a URL ask for.

        Raises:
            UsageError: A field is not valid, or no message in the state can match.
        """
        found = cls(
            state=State.of_word(asked.get("state") or State.READY.word),
            newest=asked.get("order") == "newest",
            after=asked.get("after") or None,
            matching=read_filter(asked),
            text=asked.get("text", "").casefold(),
        )
        if found.matching.is_of_failed and found.state is not State.FAILED:
            raise UsageError("error, code and group need the state failed")
        if found.matching.is_of_finished and found.state not in {State.DONE, State.FAILED}:
            raise UsageError("since and until need the state done or failed")
        return found

    @property
    def is_search(self) -> bool:
        """Whether messages are compared, and not only listed."""
        return bool(self.text) or not self.matching.is_empty

    def matches(self, stored: StoredMessage, *, masked: bool) -> bool:
        """Return whether a message is in the list. With `masked`, secrets in its body are not compared."""
        return self.matching.matches(stored) and (
            not self.text or self.text in search_text_of(stored, masked=masked).casefold()
        )


class MessageList(msgspec.Struct, frozen=True, kw_only=True):
    """A list, or the part of it that was found.

    Attributes:
        messages: The messages.
        at: Unix seconds at which they were read. None: they are being read.
        following: Where the list continues. None: this is its end.
        searched: The number of messages that were compared. None: it is not a search.
        problem: Why it cannot be read.
        ids: The ids that the sampler has seen, in place of the messages of a queue that is too deep for a list.
    """

    messages: list[StoredMessage] = []
    at: float | None = None
    following: str | None = None
    searched: int | None = None
    problem: str | None = None
    ids: list[str] = []


async def read_list(source: Source, one: QueueSnapshot, asked: ListQuery, access: Access, limit: int) -> MessageList:
    """Return a list, of at most `limit` messages.

    Raises:
        Busy: Another search of the same user runs.
        BackendError: A search cannot read the store.
    """
    if asked.is_search:
        async with source.scans.next(access.name):
            backend = await source.watch.backend()
            return await _search(backend, one.queue, asked, limit, not access.sees_secrets, source.clock)
    count = None if one.counted is None else one.counted.count
    # While nothing changes, the sampler keeps its count, and the list stands too.
    is_fresh = one.counted is not None and source.clock.time() - one.counted.at <= FRESH_S
    if count is not None and asked.state is State.READY and count.stats.ready > _LISTED and count.first:
        return MessageList(at=source.clock.time(), ids=count.last if asked.newest else count.first)
    query = Query(asked.state, after=asked.after, limit=limit + 1, newest=asked.newest)

    async def read() -> list[StoredMessage]:
        return await list_messages(await source.watch.backend(), one.queue, query)

    look = await source.watch.looks.look(("list", one.queue, query), read, basis=count if is_fresh else None)
    found = look.value or []
    following = found[limit - 1].position if len(found) > limit else None
    return MessageList(messages=found[:limit], at=look.at, following=following, problem=look.problem)


async def _search(
    backend: Backend, queue: str, asked: ListQuery, limit: int, masked: bool, clock: Clock
) -> MessageList:
    """Compare messages until the list is full, or the search has used its budget."""
    at, deadline = clock.time(), clock.monotonic() + _SECONDS
    found: list[StoredMessage] = []
    searched = 0
    query = Query(asked.state, after=asked.after, limit=MOST_SCANNED, newest=asked.newest)
    async for page in backend.browse(queue, query):
        for stored in page:
            searched += 1
            if asked.matches(stored, masked=masked):
                found.append(stored)
            is_over = searched % _CHECK_EVERY == 0 and clock.monotonic() >= deadline
            if len(found) == limit or searched == MOST_SCANNED or is_over:
                return MessageList(messages=found, at=at, following=stored.position, searched=searched)
            if searched % _CHECK_EVERY == 0:
                await asyncio.sleep(0)
    return MessageList(messages=found, at=at, searched=searched)
