"""The contract of the history: the events that a worker records, and how they are read."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, cast

import msgspec
import pytest

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.context import Context
from qworker.decision import Fail, Retry
from qworker.errors import UsageError
from qworker.history.batch import to_batches
from qworker.history.event import Event
from qworker.message import Message
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import P, Test
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions

__all__ = ["HistoryContract"]


class _App(Tasks):
    """An app with an open backend."""

    def __init__(self, backend: Backend) -> None:
        super().__init__("memory:")
        self._given = backend

    async def backend(self) -> Backend:
        return self._given


def events_of(queue: str, count: int) -> list[Event]:
    """Return events as workers record them. The names contain characters that look like syntax."""
    return [
        Event(
            kind="acked" if number % 2 else "leased",
            at=1_800_000_000.25 + number,
            queue=queue,
            id=f"m{number}",
            task=None if number % 3 == 0 else 'a "task"\n\\',
            tries=number % 4,
            worker="host-1",
            token=2**53 + number,
            duration_s=0.001 * number if number % 2 else None,
            enqueued_at=1_700_000_000.5,
            error=None if number % 5 else "it's \u2028 broken, \ud800 and all",
        )
        for number in range(count)
    ]


def _textual(text: str | None) -> str:
    return (text or "").replace("\ud800", "?")


async def read_all(backend: Backend, queue: str, limit: int = 1000) -> list[Event]:
    """Return the events of a queue in all logs. Those of one log are in order."""
    found: list[Event] = []
    for log in await backend.history.logs():
        after: str | None = None
        while True:
            page, following = await backend.history.read(log, after, limit)
            if not page:
                break
            assert len(page) <= limit
            assert following is not None
            assert after is None or following > after
            found += [event for event in page if event.queue == queue]
            after = following
    return found


async def _nothing_is_recorded(case: Case) -> None:
    await case.backend.create(case.queue)
    case.backend.history.append(to_batches(events_of(case.queue, 3)))
    assert await case.backend.history.logs() == []
    assert await case.backend.history.read("nothing-here", None, 10) == ([], None)
    assert await case.backend.history.for_message(case.queue, "m0") == []


def _recorded(test: Test[P]) -> Test[P]:
    """Mark a test that needs a history. On a backend with a disabled history, prove that nothing is recorded."""

    @functools.wraps(test)
    async def proved(self: Any, case: Case, *args: P.args, **kwargs: P.kwargs) -> None:
        if case.backend.history.enabled:
            await test(self, case, *args, **kwargs)
        else:
            await _nothing_is_recorded(case)

    return cast("Test[P]", proved)


async def _run_worker(case: Case) -> tuple[list[str], str]:
    """Run messages that are acked, failed, retried and acked, and raw. Return their ids and the worker's name."""
    app = _App(case.backend)

    @app.task(queue=case.queue, max_tries=5)
    async def work(context: Context, what: str) -> None:
        if what == "retry" and not retried:
            retried.append(what)
            raise Retry(delay=0, reason="not yet")
        if what == "fail":
            raise Fail("never")

    @app.raw_handler(queue=case.queue)
    async def raw(message: Message) -> None: ...

    retried: list[str] = []
    drafts = [work.call(what).draft for what in ("ack", "fail", "retry")]
    ids = [*await case.backend.publish(case.queue, drafts), *await case.publish(b"no envelope")]
    worker = Worker(app, WorkerOptions(concurrency=10))
    running = asyncio.create_task(worker.run())
    await wait_until(lambda: worker.counts.acked == 3 and worker.counts.failed == 1)
    worker.drain()
    assert await running
    return ids, worker.name


class HistoryContract(Contract):
    """The tests of the history. If `history.enabled` is false, nothing is recorded."""

    @_recorded
    async def test_batches_have_the_events_that_are_read_one_by_one(self, case: Case) -> None:
        await case.backend.create(case.queue)
        history = case.backend.history
        history.append(to_batches(events_of(case.queue, 9)))
        found = await self._until_recorded(case, 9)
        events: list[Event] = []
        for log in await history.logs():
            after: str | None = None
            while (page := await history.read_batches(log, after, 2))[0]:
                assert len(page[0]) <= 2
                events += [event for batch in page[0] if batch.queue == case.queue for event in batch.events()]
                after = page[1]
            assert after == await history.last_position(log)
        assert events == found
        assert await history.read_batches("nothing-here", None, 2) == ([], None)

    async def test_every_transition_is_told_by_the_history_in_order(self, case: Case) -> None:
        (acked, failed, again, plain), worker = await _run_worker(case)
        if not case.backend.history.enabled:
            assert await read_all(case.backend, case.queue) == []
            return
        found = await self._until_recorded(case, 4 * 3 + 2)
        told = {
            name: [(event.kind, event.tries) for event in found if event.id == name]
            for name in (acked, failed, again, plain)
        }
        counted = "tries_counted" not in case.harness.deviations
        assert told == {
            acked: [("enqueued", 0), ("leased", 0), ("acked", 0)],
            failed: [("enqueued", 0), ("leased", 0), ("failed", 0)],
            again: [
                ("enqueued", 0),
                ("leased", 0),
                ("retried", 0),
                *([] if counted else [("enqueued", 0)]),
                ("leased", int(counted)),
                ("acked", int(counted)),
            ],
            plain: [("enqueued", 0), ("leased", 0), ("acked", 0)],
        }
        assert {event.task for event in found if event.id != plain} == {"work"}
        assert {event.task for event in found if event.id == plain} == {None}
        assert {event.worker for event in found} == {worker}
        ends = {event.kind: event for event in found if event.id in (failed, again)}
        assert (ends["failed"].error, ends["retried"].error) == ("never", "not yet")
        assert all(event.duration_s is not None and event.duration_s >= 0 for event in ends.values() if event.error)
        # These times are by the worker's clock. The time of publishing is by the store's.
        leased, ended = [event.at for event in found if event.id == acked][-2:]
        assert leased <= ended
        history = await case.backend.history.for_message(case.queue, again)
        assert [event.kind for event in history if event.kind != "enqueued"] == ["leased", "retried", "leased", "acked"]

    async def _until_recorded(self, case: Case, count: int) -> list[Event]:
        async def told() -> list[Event]:
            found = await read_all(case.backend, case.queue)
            return found if len(found) >= count else []

        return await wait_until(told, what=f"{count} events")

    @pytest.mark.parametrize("limit", [1, 7, 1000])
    @_recorded
    async def test_a_log_is_read_in_pages_of_any_size(self, case: Case, limit: int) -> None:
        await case.backend.create(case.queue)
        given = events_of(case.queue, 20)
        case.backend.history.append(to_batches(given[:11]))
        case.backend.history.append(to_batches(given[11:]))
        found = await self._until_recorded(case, 20)
        assert [event.id for event in found] == [event.id for event in given]
        assert await read_all(case.backend, case.queue, limit) == found
        for event, one in zip(found, given, strict=True):
            # Half of a surrogate pair is not valid text.
            assert _textual(event.error) == _textual(one.error)
            assert event.duration_s == pytest.approx(one.duration_s)
        assert [(e.at, e.task, e.tries, e.token, e.enqueued_at) for e in found] == [
            (e.at, e.task, e.tries, e.token, e.enqueued_at) for e in given
        ]

    @_recorded
    async def test_another_process_reads_on_where_it_has_left_off(self, case: Case) -> None:
        await case.backend.create(case.queue)
        reader = await case.open()
        case.backend.history.append(to_batches(events_of(case.queue, 3)))
        assert len(await self._until_recorded(case, 3)) == 3
        ends = {log: await reader.history.last_position(log) for log in await reader.history.logs()}
        assert ends == {log: await self._end(reader, log) for log in ends}
        case.backend.history.append(to_batches(events_of(case.queue, 5)[3:]))

        async def told() -> list[str]:
            pages = [(await reader.history.read(log, ends.get(log), 100))[0] for log in await reader.history.logs()]
            found = [event.id for page in pages for event in page if event.queue == case.queue]
            # A store may show one of them before the other.
            return found if len(found) >= 2 else []

        assert await wait_until(told) == ["m3", "m4"]

    @_recorded
    @pytest.mark.parametrize("limit", [1, 3, 1000])
    async def test_a_log_is_read_backwards_from_its_end_or_any_place_of_an_earlier_read(
        self, case: Case, limit: int
    ) -> None:
        history = case.backend.history
        await case.backend.create(case.queue)
        history.append(to_batches(events_of(case.queue, 7)))
        await self._until_recorded(case, 7)
        ends = {log: await history.last_position(log) for log in await history.logs()}
        history.append(to_batches([msgspec.structs.replace(events_of(case.queue, 1)[0], id="later")]))
        found: list[str] = []
        for log, end in ends.items():
            before = end
            while before is not None:
                batches, before = await history.read_back(log, before, limit)
                assert len(batches) <= limit
                mine = [event for batch in batches for event in reversed(batch.events()) if event.queue == case.queue]
                found += [event.id for event in mine]
        assert found == [f"m{number}" for number in range(6, -1, -1)]
        assert await history.read_back("nothing-here", None, limit) == ([], None)

    @_recorded
    async def test_forgotten_history_may_be_gone_and_what_follows_stays(self, case: Case) -> None:
        await case.backend.create(case.queue)
        case.backend.history.append(to_batches(events_of(case.queue, 3)))
        await self._until_recorded(case, 3)
        for log in await case.backend.history.logs():
            end = await self._end(case.backend, log)
            if end is not None:
                await case.backend.history.delete_before(log, end)
        case.backend.history.append(to_batches(events_of(case.queue, 5)[3:]))

        async def told() -> list[str]:
            found = [event.id for event in await read_all(case.backend, case.queue)]
            return found if found[-2:] == ["m3", "m4"] else []

        assert (await wait_until(told))[-2:] == ["m3", "m4"]

    @staticmethod
    async def _some_log(case: Case) -> str:
        await case.backend.create(case.queue)
        case.backend.history.append(to_batches(events_of(case.queue, 1)))
        return (await wait_until(case.backend.history.logs))[0]

    @staticmethod
    async def _end(backend: Backend, log: str) -> str | None:
        after: str | None = None
        while True:
            page, after = await backend.history.read(log, after, 1000)
            if not page:
                return after

    @_recorded
    async def test_the_history_of_what_is_not_there_is_empty(self, case: Case) -> None:
        assert await case.backend.history.read("nothing-here", None, 10) == ([], None)
        with pytest.raises(UsageError, match="not a position"):
            await case.backend.history.read((await self._some_log(case)), "yesterday", 10)
        assert await case.backend.history.for_message(case.queue, "unknown") == []
