"""The search in a history: the newest first, page by page, in a limited time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from qworker.errors import UsageError
from qworker.history.batch import EventBatch
from qworker.history.directory import DirectoryHistory
from qworker.history.event import Event
from qworker.history.memory import MemoryHistory
from qworker.history.query import EventFilter
from qworker.history.search import FoundEvents, search_back
from qworker.history.store import HistoryOptions, HistoryStore
from qworker.testing import FakeClock

ANY = EventFilter()


def batch(number: int, worker: str = "w1-7", queue: str = "mail", error: str | None = None) -> EventBatch:
    kind = "acked" if error is None else "retried"
    return EventBatch(
        kind=kind, queue=queue, worker=worker, at=float(number), id=[f"m{number}"], task="send", error=error
    )


@pytest_asyncio.fixture(params=["memory", "directory", "plain"])
async def histories(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[HistoryStore]]:
    """The logs of two processes in one history. The last of them is read."""
    if request.param != "directory":
        memory = MemoryHistory()
        if request.param == "plain":
            # A store that can only be read forwards.
            class Plain(MemoryHistory):
                read_back = HistoryStore.read_back

            memory = Plain()
        yield [memory, memory]
        return
    opened = [DirectoryHistory(str(tmp_path), HistoryOptions(), clock=FakeClock()) for _ in range(2)]
    yield opened
    for one in opened:
        await one.aclose()


async def search_all(history: HistoryStore, wanted: EventFilter, limit: int) -> list[list[Event]]:
    pages: list[list[Event]] = []
    cursor: str | None = None
    while True:
        found = await search_back(history, wanted, limit=limit, cursor=cursor, seconds=60)
        pages.append(found.events)
        cursor = found.cursor
        if cursor is None:
            return pages


async def test_pages_hold_each_event_of_all_logs_once_and_the_newest_come_first(histories: list[HistoryStore]) -> None:
    for number in range(20):
        histories[number % 2].append([batch(number)])
    pages = await search_all(histories[1], ANY, 3)
    assert [len(page) for page in pages[:6]] == [3] * 6
    assert [event.at for page in pages for event in page] == [float(number) for number in range(19, -1, -1)]


async def test_events_that_are_recorded_meanwhile_are_on_no_later_page(histories: list[HistoryStore]) -> None:
    histories[0].append([batch(number) for number in range(6)])
    first = await search_back(histories[1], ANY, limit=2, seconds=60)
    histories[0].append([batch(9)])
    second = await search_back(histories[1], ANY, limit=9, cursor=first.cursor, seconds=60)
    assert [event.id for event in second.events] == ["m3", "m2", "m1", "m0"]
    assert (second.cursor, second.searched_to) == (None, None)


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (EventFilter(queue="other"), ["m3"]),
        (EventFilter(task="send", kinds=frozenset({"retried"})), ["m2"]),
        (EventFilter(id="m1"), ["m1"]),
        (EventFilter(worker="w2"), ["m4"]),
        (EventFilter(error="REFUSED"), ["m2"]),
        (EventFilter(since=1.0, until=2.0), ["m2", "m1"]),
        (EventFilter(task="absent"), []),
    ],
)
async def test_each_field_chooses_events(histories: list[HistoryStore], wanted: EventFilter, ids: list[str]) -> None:
    for one in (batch(0), batch(1), batch(2, error="host 7 refused"), batch(3, queue="other"), batch(4, "w2-9")):
        histories[0].append([one])
    pages = await search_all(histories[1], wanted, 10)
    assert [event.id for page in pages for event in page] == ids


async def test_a_search_that_takes_long_says_how_far_it_has_come_and_goes_on_from_there() -> None:
    history, clock = MemoryHistory(), FakeClock()
    for number in range(500):
        history.append([batch(number)])

    class Slow(MemoryHistory):
        async def read_back(  # type: ignore[no-untyped-def]
            self, log, before, limit, needles=()
        ):
            clock.advance(1.0)
            return await history.read_back(log, before, limit, needles)

        logs = history.logs
        last_position = history.last_position

    async def search(cursor: str | None) -> FoundEvents:
        return await search_back(Slow(), EventFilter(id="m7"), limit=5, cursor=cursor, seconds=2.0, clock=clock)

    first = await search(None)
    assert (first.events, first.searched_to) == ([], 372.0)
    rounds, found = 1, first
    while found.cursor is not None and not found.events:
        rounds, found = rounds + 1, await search(found.cursor)
    assert ([event.id for event in found.events], rounds) == (["m7"], 4)


@pytest.mark.parametrize("cursor", ["x", "AAAA", "eJyLjgUAARUAuQ"])
async def test_what_is_no_cursor_is_a_mistake_in_one_line(cursor: str) -> None:
    with pytest.raises(UsageError, match="not one of this search"):
        await search_back(MemoryHistory(), ANY, limit=1, cursor=cursor, seconds=1)
