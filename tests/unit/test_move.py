"""Moving queues between backends: wherever the move ends, no message is lost, and no moved message runs twice."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from qworker import Draft, State
from qworker.backend.listing import list_messages
from qworker.cell import Cell, CellOp
from qworker.errors import BackendError, BackendUnavailable, QueueNotFound
from qworker.message import Query, Selection, SettleAction, Settlement
from qworker.testing import FakeClock
from qworker.tools.move import move
from qworker.unique import Unique, Until
from qworker_memory import MemoryBackend

QUEUE = "jobs"
_names = itertools.count()


class Fragile(MemoryBackend):
    """A store that fails when it is told to: before an operation, or after it has happened."""

    fail_before: str = ""
    fail_after: str = ""

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        self._stumble("publish", self.fail_before)
        ids = await super().publish(queue, drafts)
        self._stumble("publish", self.fail_after)
        return ids

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        if any(s.action is SettleAction.ACK for s in settlements):
            self._stumble("ack", self.fail_before)
        return await super().settle(settlements)

    async def remove(self, queue: str, selection: Selection) -> int:
        self._stumble("remove", self.fail_before)
        return await super().remove(queue, selection)

    def _stumble(self, what: str, wanted: str) -> None:
        if what == wanted:
            self.fail_before = self.fail_after = ""
            raise BackendUnavailable(f"{what} is cut off")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def source(clock: FakeClock) -> Fragile:
    return Fragile(f"move-source-{next(_names)}", clock=clock)


@pytest.fixture
def target(clock: FakeClock) -> Fragile:
    return Fragile(f"move-target-{next(_names)}", clock=clock)


async def everything(backend: MemoryBackend) -> dict[str, State]:
    return {s.message.id: state for state in State for s in await list_messages(backend, QUEUE, Query(state))}


async def test_a_message_keeps_its_id_tries_times_priority_and_key(
    source: Fragile, target: Fragile, clock: FakeClock
) -> None:
    await source.publish(
        QUEUE, [Draft(body=b"a", id="a", tries=3, enqueued_at=5.0, priority=7, unique_key="k", argv=("x",))]
    )
    await source.publish(QUEUE, [Draft(body=b"b", id="b", delay=500)])
    moved = await move(source, target, QUEUE, clock=clock)
    assert (moved.ready, moved.delayed, moved.failed, moved.left_leased) == (1, 1, 0, 0)
    assert await everything(source) == {}
    [found] = await list_messages(target, QUEUE, Query(State.READY))
    message = found.message
    assert (message.id, message.tries, message.enqueued_at, message.priority) == ("a", 3, 5.0, 7)
    assert (message.unique_key, message.argv, message.body) == ("k", ("x",), b"a")
    [later] = await list_messages(target, QUEUE, Query(State.DELAYED))
    assert later.due_at == clock.time() + 500


@pytest.mark.parametrize("until", ["done", "started"])
async def test_messages_that_had_one_key_after_the_other_all_move(
    source: Fragile, target: Fragile, clock: FakeClock, until: Until
) -> None:
    unique = Unique(until=until, again="keep" if until == "started" else "replace")
    for body in (b"1", b"2", b"3"):
        await source.publish(QUEUE, [Draft(body=body, unique_key="k", unique=unique)])
        await source.lease(QUEUE, 1, 30)
    # They wait again, and only one of them can have the key.
    clock.advance(60)
    await source.reap(QUEUE)
    ids = set(await everything(source))
    assert len(ids) == 3
    assert (await move(source, target, QUEUE, clock=clock)).ready == 3
    assert await everything(target) == dict.fromkeys(ids, State.READY)
    keys = [one.message.unique_key for one in await list_messages(target, QUEUE, Query(State.READY))]
    assert sorted(map(str, keys)) == ["None", "None", "k"]


async def test_failed_messages_with_one_key_all_move(source: Fragile, target: Fragile, clock: FakeClock) -> None:
    for _ in range(2):
        await source.publish(QUEUE, [Draft(body=b"", unique_key="k")])
        [lease] = await source.lease(QUEUE, 1, 30)
        await source.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="no")])
    ids = set(await everything(source))
    assert (await move(source, target, QUEUE, failed=True, clock=clock)).failed == 2
    assert set(await everything(target)) == ids


async def test_thousands_move_in_order(source: Fragile, target: Fragile, clock: FakeClock) -> None:
    ids = await source.publish(QUEUE, [Draft(body=b"") for _ in range(1500)])
    counts: list[int] = []
    moved = await move(source, target, QUEUE, progress=counts.append, clock=clock)
    assert moved.total == sum(counts) == 1500
    assert [s.message.id for s in await list_messages(target, QUEUE, Query(State.READY))] == ids


@pytest.mark.parametrize(
    ("broken", "before", "after"),
    [("target", "publish", ""), ("target", "", "publish"), ("source", "ack", ""), ("source", "remove", "")],
)
async def test_a_move_that_is_cut_off_loses_nothing_and_can_be_repeated(
    source: Fragile, target: Fragile, clock: FakeClock, broken: str, before: str, after: str
) -> None:
    ids = await source.publish(QUEUE, [Draft(body=b"") for _ in range(5)])
    ids += await source.publish(QUEUE, [Draft(body=b"", delay=100 + n) for n in range(5)])
    await target.create(QUEUE)
    failing = {"source": source, "target": target}[broken]
    failing.fail_before, failing.fail_after = before, after
    with pytest.raises(BackendUnavailable):
        await move(source, target, QUEUE, clock=clock)
    assert {*await everything(source), *await everything(target)} == set(ids)
    # As after a kill: what the first run had leased comes back.
    clock.advance(130)
    await source.reap(QUEUE)
    await move(source, target, QUEUE, clock=clock)
    assert await everything(source) == {}
    assert set(await everything(target)) == set(ids)


async def test_what_workers_of_the_source_hold_stays_with_them(
    source: Fragile, target: Fragile, clock: FakeClock
) -> None:
    await source.publish(QUEUE, [Draft(body=b"", id="held"), Draft(body=b"", id="free")])
    [lease] = await source.lease(QUEUE, 1, 30)
    moved = await move(source, target, QUEUE, clock=clock)
    assert (moved.ready, moved.left_leased) == (1, 1)
    assert await source.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
    assert set(await everything(target)) == {"free"}


async def test_failed_messages_move_when_asked_and_get_another_chance(
    source: Fragile, target: Fragile, clock: FakeClock
) -> None:
    await source.publish(QUEUE, [Draft(body=b"", id="f", tries=4)])
    [lease] = await source.lease(QUEUE, 1, 30)
    await source.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="no")])
    assert (await move(source, target, QUEUE, clock=clock)).total == 0
    assert (await move(source, target, QUEUE, failed=True, clock=clock)).failed == 1
    [found] = await list_messages(target, QUEUE, Query(State.READY))
    assert (found.message.id, found.message.tries) == ("f", 0)


async def test_a_failed_message_that_is_requeued_meanwhile_is_not_copied(
    source: Fragile, target: Fragile, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await source.publish(QUEUE, [Draft(body=b"", id=f"f{number:03}") for number in range(450)])
    leases = await source.lease(QUEUE, 450, 30)
    await source.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM) for lease in leases])
    copied: list[str | None] = []
    publish = target.publish

    async def requeueing(queue: str, drafts: Sequence[Draft]) -> list[str]:
        if not copied:
            await source.requeue(QUEUE, Selection(ids=[ids[400]]))
            await source.lease(QUEUE, 1, 1000)
        copied.extend(draft.id for draft in drafts)
        return await publish(queue, drafts)

    monkeypatch.setattr(target, "publish", requeueing)
    moved = await move(source, target, QUEUE, failed=True, clock=clock)
    assert (moved.failed, moved.left_leased) == (449, 1)
    assert copied == [*ids[:400], *ids[401:]]


async def test_a_paused_or_absent_source_is_told(source: Fragile, target: Fragile, clock: FakeClock) -> None:
    with pytest.raises(QueueNotFound):
        await move(source, target, QUEUE, clock=clock)
    await source.publish(QUEUE, [Draft(body=b"")])
    await source.pause(QUEUE)
    with pytest.raises(BackendError, match="is paused"):
        await move(source, target, QUEUE, clock=clock)


async def list_cells(backend: MemoryBackend) -> list[tuple[str, str, bytes, int]]:
    (groups,) = await backend.cells(QUEUE, [CellOp("list", Cell("", ""))])
    replies = await backend.cells(QUEUE, [CellOp("list", Cell(group.group, "")) for group in groups.cells])
    return [(cell.group, cell.name, cell.value, cell.rank) for reply in replies for cell in reply.cells]


async def test_cells_move_with_their_ranks_and_the_rest_of_their_lifetimes(
    source: Fragile, target: Fragile, clock: FakeClock
) -> None:
    cells = [Cell("g", f"{number:03}", b"%d" % number, rank=number) for number in range(150)]
    await source.cells(QUEUE, [CellOp("put", cell) for cell in [*cells, Cell("h", "n", b"short", ttl=100.0)]])
    await target.cells(QUEUE, [CellOp("put", Cell("g", "001", b"newer", rank=2)), CellOp("put", Cell("g", "002"))])
    clock.advance(60.0)
    moved = await move(source, target, QUEUE, clock=clock)
    assert (moved.cells, moved.left_cells) == (151, 0)
    assert await list_cells(source) == []
    (first, short) = await target.cells(QUEUE, [CellOp("get", Cell("g", "001")), CellOp("get", Cell("h", "n"))])
    assert first.cell is not None
    assert first.cell.value == b"newer"
    assert short.cell is not None
    assert short.cell.ttl == pytest.approx(40.0)
    found = [(cell.group, cell.name, cell.value, cell.rank) for cell in cells[2:100]]
    assert (await list_cells(target))[2:100] == found
    assert (await move(source, target, QUEUE, clock=clock)).cells == 0


async def test_cells_stay_if_the_target_has_none(source: Fragile, target: Fragile, clock: FakeClock) -> None:
    await source.cells(QUEUE, [CellOp("put", Cell("g", "n", b"x"))])
    vars(target)["deviations"] = {"cells": "it has none"}
    moved = await move(source, target, QUEUE, clock=clock)
    assert (moved.cells, moved.left_cells) == (0, 1)
    assert await list_cells(source) == [("g", "n", b"x", 0)]
