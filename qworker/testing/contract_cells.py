"""The contract of `cells`, and of `wait` for cells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from qworker.backend import Backend
from qworker.cell import CELLS_PER_PAGE, MOST_RANK, MOST_VALUE, Cell, CellAction, CellOp, CellReply, CellWatch
from qworker.errors import UsageError
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["CellsContract"]

# Seconds: see `contract_wait`.
_ENDLESS = 600.0
_DEADLINE = 40.0

# Texts that a store may have to encode, sorted.
_NAMES = sorted(
    [
        *("\0", "\x01", "\x01\x02", " ", "%", "%41", ".", "..", ".hidden", "/", "A", "\\0", "a", "a\0b", "a/b", "a\nb"),
        *("a:b", "a~", "b" * 199, "b" * 200, "b" * 201, "c" * 1000, "~", "~c", "é", "\U0001f600"),
    ]
)


async def carry_out(case: Case, *ops: CellOp, by: Backend | None = None) -> list[CellReply]:
    """Carry out operations as one batch."""
    return await (by or case.backend).cells(case.queue, ops)


async def carry_out_one(case: Case, op: CellOp, by: Backend | None = None) -> CellReply:
    """Carry out one operation."""
    (reply,) = await carry_out(case, op, by=by)
    return reply


def put(
    name: str,
    value: bytes = b"",
    *,
    group: str = "g",
    only: str | None = None,
    rank: int = 0,
    ttl: float | None = None,
) -> CellOp:
    """Return a put."""
    return CellOp("put", Cell(group, name, value, ttl=ttl, rank=rank), only)


def on(do: CellAction, name: str = "", *, group: str = "g", only: str | None = None) -> CellOp:
    """Return another operation."""
    return CellOp(do, Cell(group, name), only)


async def value_of(case: Case, name: str, group: str = "g") -> bytes | None:
    """Return the value of a cell, or None if it is absent."""
    reply = await carry_out_one(case, on("get", name, group=group))
    assert reply.done == (reply.cell is not None)
    return None if reply.cell is None else reply.cell.value


@contextlib.asynccontextmanager
async def woken(case: Case, version: str, by: Backend | None = None) -> AsyncGenerator[None]:
    """Prove that the code inside the block changes the cell `n` for a wait that began before it."""
    backend = by or case.backend

    async def wait_for_change() -> None:
        # A wake-up is a hint. Only a wait after which the cell has another version counts.
        seen = version
        while seen == version:
            await backend.wait([], _ENDLESS, [CellWatch(case.queue, "g", "n", version)])
            found = (await carry_out_one(case, on("get", "n"), by=backend)).cell
            seen = "" if found is None else found.version

    async with asyncio.timeout(_DEADLINE):
        waiting = asyncio.create_task(wait_for_change())
        try:
            await case.until_waiting(waiting, by=backend)
            yield
            await waiting
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])


class CellsContract(Contract):
    """The tests of `cells`, and of `wait` for cells."""

    @rule("cells")
    async def test_a_cell_that_was_put_is_found_by_every_process(self, case: Case) -> None:
        stored = await carry_out_one(case, put("n", b"\0value\n", rank=3))
        assert stored.done
        assert stored.cell is not None
        assert stored.cell.version
        other = await case.open()
        found = await carry_out_one(case, on("get", "n"), by=other)
        assert found == CellReply(True, stored.cell)
        assert found.cell == Cell("g", "n", b"\0value\n", stored.cell.version, None, 3)

    @rule("cells")
    async def test_an_absent_cell_is_reported_and_nothing_is_created(self, case: Case) -> None:
        ops = [on("get", "n"), on("delete", "n"), on("delete", "n", only="1"), on("list"), on("close")]
        absent = [CellReply(False)] * 3 + [CellReply(True, empty=True)] * 2
        assert await carry_out(case, *ops) == absent
        assert await carry_out(case) == []
        assert case.queue not in await case.backend.queues()
        await case.backend.create(case.queue)
        assert await carry_out(case, *ops) == absent

    @rule("cells")
    async def test_a_put_creates_the_queue_and_its_deletion_deletes_the_cells(self, case: Case) -> None:
        await carry_out(case, put("n"), put("m", group="h", ttl=case.long))
        assert case.queue in await case.backend.queues()
        assert (await case.stats()).ready == 0
        await case.backend.delete(case.queue)
        assert await value_of(case, "n") is None
        await case.backend.create(case.queue)
        assert await carry_out_one(case, on("list", group="")) == CellReply(True, empty=True)

    @rule("cells")
    async def test_each_put_has_another_version(self, case: Case) -> None:
        versions: set[str] = set()
        for _ in range(3):
            for op in (put("n"), put("n", only="" if _ == 0 else None), put("m")):
                reply = await carry_out_one(case, op)
                versions.add(
                    reply.cell.version if reply.done and reply.cell is not None else f"refused {len(versions)}"
                )
            await carry_out(case, on("delete", "n"))
        assert len(versions) == 9

    @rule("cells")
    async def test_a_put_only_if_absent_never_replaces_a_cell(self, case: Case) -> None:
        first = await carry_out_one(case, put("n", b"1", only=""))
        assert first.done
        assert await carry_out_one(case, put("n", b"2", only="")) == CellReply(False, first.cell)
        assert await value_of(case, "n") == b"1"
        await carry_out(case, on("delete", "n"))
        assert (await carry_out_one(case, put("n", b"3", only=""))).done

    @rule("cells")
    async def test_a_put_and_a_delete_of_a_version_need_that_version(self, case: Case) -> None:
        first = (await carry_out_one(case, put("n", b"1"))).cell
        assert first is not None
        second = (await carry_out_one(case, put("n", b"2", only=first.version))).cell
        assert second is not None
        stale = [put("n", b"3", only=first.version), on("delete", "n", only=first.version), on("delete", "n", only="")]
        assert await carry_out(case, *stale) == [CellReply(False, second)] * 3
        assert await carry_out_one(case, on("delete", "n", only=second.version)) == CellReply(True)
        assert await carry_out_one(case, put("n", b"4", only=second.version)) == CellReply(False)
        assert await value_of(case, "n") is None

    @rule("cells")
    async def test_a_put_below_the_stored_rank_is_refused(self, case: Case) -> None:
        for rank in (-MOST_RANK, -5, 7, 7, MOST_RANK):
            assert (await carry_out_one(case, put("n", b"%d" % rank, rank=rank))).done
        stored = (await carry_out_one(case, on("get", "n"))).cell
        assert stored is not None
        assert stored.rank == MOST_RANK
        lower = put("n", b"low", rank=MOST_RANK - 1)
        assert await carry_out_one(case, lower) == CellReply(False, stored)
        assert not (await carry_out_one(case, put("n", rank=0, only=stored.version))).done
        assert await value_of(case, "n") == b"%d" % MOST_RANK
        await carry_out(case, on("delete", "n"))
        assert (await carry_out_one(case, lower)).done

    @rule("cells")
    async def test_an_expired_cell_is_absent(self, case: Case) -> None:
        ttl = case.tick
        await carry_out(case, put("n", b"1", ttl=ttl, rank=9), put("m", ttl=ttl), put("k", ttl=case.long), put("l"))
        found = (await carry_out_one(case, on("get", "n"))).cell
        assert found is not None
        assert found.ttl is not None
        assert 0 < found.ttl <= ttl
        await case.harness.advance(ttl * 1.5)
        assert [cell.name for cell in (await carry_out_one(case, on("list"))).cells] == ["k", "l"]
        assert await carry_out_one(case, on("get", "n")) == CellReply(False)
        assert await carry_out_one(case, on("delete", "n")) == CellReply(False)
        assert await carry_out_one(case, put("n", only=found.version)) == CellReply(False)
        assert (await carry_out_one(case, put("n", b"2", only=""))).done
        assert (await carry_out_one(case, put("m", rank=1))).done
        # The next put decides anew whether the cell expires.
        await case.harness.advance(ttl * 3)
        assert (await case.backend.reap(case.queue)).returned == 0
        assert [cell.name for cell in (await carry_out_one(case, on("list"))).cells] == ["k", "l", "m", "n"]

    @rule("cells")
    async def test_a_cell_stays_that_is_put_again_before_it_expires(self, case: Case) -> None:
        ttl = case.tick * 2
        await carry_out(case, put("n", ttl=ttl), put("gone", ttl=ttl))
        for _ in range(3):
            await case.harness.advance(ttl * 0.6)
            await carry_out(case, put("n", ttl=ttl))
            await case.backend.reap(case.queue)
        assert await value_of(case, "n") == b""
        assert await value_of(case, "gone") is None

    @rule("cells")
    async def test_a_group_is_closed_if_it_has_no_cells(self, case: Case) -> None:
        closed, refused = CellReply(True, empty=True), CellReply(False)
        await carry_out(case, put("n"), put("m", ttl=case.tick), put("n", group="h"))
        assert await carry_out(case, on("delete", "n"), on("close"), on("delete", "m"), on("close")) == [
            CellReply(True),
            refused,
            CellReply(True),
            closed,
        ]
        assert await carry_out_one(case, on("close")) == closed
        # A closed group can be used again, also in the same batch.
        again = [put("n"), on("get", "n"), on("close"), on("delete", "n"), on("close"), put("n", ttl=case.tick)]
        assert [reply.done for reply in await carry_out(case, *again)] == [True, True, False, True, True, True]
        await case.harness.advance(case.tick * 1.5)
        assert await carry_out_one(case, on("close")) == closed
        assert await carry_out_one(case, on("close", group="h")) == refused

    @rule("cells")
    async def test_a_list_has_pages_in_the_order_of_names(self, case: Case) -> None:
        names = [f"{number:04}" for number in range(CELLS_PER_PAGE * 2 + 7)]
        await carry_out(case, *[put(name, name.encode(), rank=1) for name in reversed(names)], put("x", group="g2"))
        listed: list[Cell] = []
        reply = CellReply(True)
        while not reply.empty:
            reply = await carry_out_one(case, on("list", listed[-1].name if listed else ""))
            assert reply.done
            assert 0 < len(reply.cells) <= CELLS_PER_PAGE
            listed += reply.cells
        assert [cell.name for cell in listed] == names
        assert all(cell.value == cell.name.encode() and cell.version and cell.rank == 1 for cell in listed)
        assert await carry_out_one(case, on("list", names[-1])) == CellReply(True, empty=True)

    @rule("cells")
    async def test_a_page_of_large_values_is_shorter(self, case: Case) -> None:
        names = [f"{number:02}" for number in range(40)]
        await carry_out(case, *[put(name, b"x" * MOST_VALUE) for name in names])
        listed: list[str] = []
        reply = CellReply(True)
        while not reply.empty:
            reply = await carry_out_one(case, on("list", listed[-1] if listed else ""))
            assert reply.cells
            listed += [cell.name for cell in reply.cells]
        assert listed == names

    @rule("cells")
    async def test_any_text_can_be_a_name(self, case: Case) -> None:
        await carry_out(case, *[put(name, b"c" + name.encode()) for name in _NAMES])
        await carry_out(case, *[put("n", b"g" + name.encode(), group=name) for name in _NAMES])
        for name in _NAMES:
            assert await value_of(case, name) == b"c" + name.encode()
            assert await value_of(case, "n", group=name) == b"g" + name.encode()
        listed = (await carry_out_one(case, on("list"))).cells
        assert [(cell.group, cell.name) for cell in listed] == [("g", name) for name in _NAMES]
        groups = (await carry_out_one(case, on("list", group=""))).cells
        assert groups == [Cell(name, "") for name in sorted([*_NAMES, "g"])]
        after = (await carry_out_one(case, on("list", "a", group=""))).cells
        assert [cell.group for cell in after] == [name for name in sorted([*_NAMES, "g"]) if name > "a"]
        await carry_out(case, *[on("delete", "n", group=name) for name in _NAMES])
        closed = await carry_out(case, *[on("close", group=name) for name in _NAMES])
        assert all(reply.done for reply in closed)

    @rule("cells")
    async def test_a_value_has_at_most_64_kib(self, case: Case) -> None:
        assert (await carry_out_one(case, put("n", b"\n" * MOST_VALUE))).done
        assert await value_of(case, "n") == b"\n" * MOST_VALUE
        bad = [
            put("n", b"x" * (MOST_VALUE + 1)),
            put(""),
            put("n", group=""),
            put("n" * 1001),
            put("\udc80"),
            put("n", ttl=0.0),
            put("n", ttl=float("nan")),
            put("n", rank=MOST_RANK + 1),
            on("get"),
            on("close", group=""),
        ]
        for op in bad:
            with pytest.raises(UsageError, match="cell"):
                await carry_out(case, put("m"), op)
        # Nothing of such a batch was carried out.
        assert await value_of(case, "m") is None

    @rule("cells")
    async def test_a_refused_operation_does_not_stop_those_after_it(self, case: Case) -> None:
        await carry_out(case, put("n", b"1"))
        ops = [put("a", b"1"), put("n", b"2", only=""), on("get", "absent"), put("b", b"2"), on("get", "n")]
        replies = await carry_out(case, *ops, put("a", b"3", only="no"), put("c", b"3", group="h"), on("delete", "n"))
        assert [reply.done for reply in replies] == [True, False, False, True, True, False, True, True]
        assert [await value_of(case, name) for name in "abn"] == [b"1", b"2", None]
        assert await value_of(case, "c", group="h") == b"3"

    @rule("cells")
    async def test_the_operations_of_a_batch_are_carried_out_in_their_order(self, case: Case) -> None:
        ops = [put("n", b"1"), on("get", "n"), put("n", b"2"), on("get", "n"), on("delete", "n"), on("get", "n")]
        replies = await carry_out(case, *ops, put("n", b"3", only=""), on("get", "n"))
        values = [None if reply.cell is None else reply.cell.value for reply in replies]
        assert values == [b"1", b"1", b"2", b"2", None, None, b"3", b"3"]
        assert replies[0].cell != replies[2].cell

    @rule("cells")
    async def test_a_batch_may_be_long(self, case: Case) -> None:
        ops = [put(f"{number}", b"x" * 100) for number in range(1200)]
        assert all(reply.done for reply in await carry_out(case, *ops))
        found = await carry_out(case, *[on("get", f"{number}") for number in range(1200)])
        assert all(reply.done for reply in found)

    @rule("cells")
    async def test_of_many_puts_only_if_absent_exactly_one_wins(self, case: Case) -> None:
        backends = [case.backend, *[await case.open() for _ in range(3)]]
        for round_ in range(5):
            group = f"g{round_}"
            puts = [
                carry_out_one(case, put("n", b"%d" % number, group=group, only=""), by=backends[number % 4])
                for number in range(20)
            ]
            replies = await asyncio.gather(*puts)
            (winner,) = [number for number, reply in enumerate(replies) if reply.done]
            assert await value_of(case, "n", group=group) == b"%d" % winner
            assert {reply.cell.value for reply in replies if reply.cell is not None} == {b"%d" % winner}

    @rule("cells")
    async def test_no_step_of_a_counter_is_lost(self, case: Case) -> None:
        backends = [case.backend, await case.open(), await case.open()]

        async def add_one(by: Backend) -> None:
            cell, done = Cell("g", "n", b"0"), False
            while not done:
                op = put("n", b"%d" % (int(cell.value) + 1), only=cell.version)
                reply = await carry_out_one(case, op, by=by)
                done, cell = reply.done, reply.cell or Cell("g", "n", b"0")

        async with asyncio.timeout(_DEADLINE):
            await asyncio.gather(*[add_one(backends[number % 3]) for number in range(30)])
        assert await value_of(case, "n") == b"30"

    @rule("cells")
    async def test_no_put_is_lost_while_others_close_its_group(self, case: Case) -> None:
        other = await case.open()

        async def put_and_delete(name: str) -> None:
            for _ in range(10):
                assert (await carry_out_one(case, put(name, only=""))).done
                assert (await carry_out_one(case, on("get", name))).done
                assert (await carry_out_one(case, on("delete", name))).done

        async def close() -> None:
            for _ in range(30):
                await carry_out_one(case, on("close"), by=other)

        async with asyncio.timeout(_DEADLINE):
            await asyncio.gather(*[put_and_delete(f"n{number}") for number in range(4)], close(), close())
        assert (await carry_out_one(case, on("close"))).empty

    @rule("cells")
    async def test_a_paused_queue_has_cells_too(self, case: Case) -> None:
        await case.backend.create(case.queue)
        if "pause" not in case.harness.deviations:
            await case.backend.pause(case.queue)
        assert (await carry_out_one(case, put("n", b"1"))).done
        assert await value_of(case, "n") == b"1"

    @rule("cells")
    async def test_cells_are_no_messages(self, case: Case) -> None:
        await case.publish(b"x")
        await carry_out(case, *[put(f"{number}") for number in range(5)])
        assert await case.counts() == (1, 0, 0, 0)
        assert await case.leased_bodies() == [b"x"]

    # -- waiting -----------------------------------------------------------------------------------------------------

    @rule("cells")
    async def test_a_wait_ends_at_once_if_the_cell_has_another_version(self, case: Case) -> None:
        watch = CellWatch(case.queue, "g", "n", "seen")
        async with asyncio.timeout(_DEADLINE):
            await case.backend.wait([], _ENDLESS, [watch])
            assert (await carry_out_one(case, put("n"))).done
            await case.backend.wait([], _ENDLESS, [watch])
            await case.backend.wait([case.queue], _ENDLESS, [CellWatch(case.queue, "g", "n")])

    @rule("cells")
    async def test_the_timeout_bounds_a_wait_for_a_cell(self, case: Case) -> None:
        absent = CellWatch(case.queue, "g", "n")
        async with asyncio.timeout(_DEADLINE):
            await case.backend.wait([], 0.05, [absent])
            stored = (await carry_out_one(case, put("n"))).cell
            assert stored is not None
            watch = CellWatch(case.queue, "g", "n", stored.version)
            await case.backend.wait([], 0.0, [watch])
            await case.backend.wait([case.queue], 0.05, [watch, CellWatch(case.queue, "h", "m")])

    @rule("cells")
    async def test_a_change_of_a_cell_wakes_a_wait(self, case: Case) -> None:
        other = await case.open()
        async with woken(case, ""):
            await carry_out(case, put("n", b"1"), by=other)
        stored = (await carry_out_one(case, on("get", "n"))).cell
        assert stored is not None
        async with woken(case, stored.version, by=other):
            await carry_out(case, put("n", b"1"))
        stored = (await carry_out_one(case, on("get", "n"))).cell
        assert stored is not None
        async with woken(case, stored.version):
            await carry_out(case, on("delete", "n"), on("close"), by=other)
        async with woken(case, ""):
            await carry_out(case, put("n", b"2"), by=other)

    @rule("cells")
    async def test_a_wait_for_several_cells_and_a_queue_ends_with_the_first_change(self, case: Case) -> None:
        other = await case.open()
        watches = [CellWatch(case.queue, "g", name) for name in "ab"] + [CellWatch(f"{case.queue}-b", "g", "c")]

        async def wait() -> None:
            await case.backend.wait([case.queue], _ENDLESS, watches)

        async with asyncio.timeout(_DEADLINE):
            waiting = asyncio.create_task(wait())
            await case.until_waiting(waiting)
            await other.cells(f"{case.queue}-b", [put("c")])
            await waiting
            del watches[2]
            waiting = asyncio.create_task(wait())
            await case.until_waiting(waiting)
            await other.cells(case.queue, [put("b")])
            await waiting
            del watches[1]
            waiting = asyncio.create_task(wait())
            await case.until_waiting(waiting)
            await case.publish(b"x")
            await waiting
        await case.backend.delete(f"{case.queue}-b")

    @rule("cells")
    async def test_a_cancelled_wait_for_a_cell_leaves_the_others(self, case: Case) -> None:
        async def wait() -> None:
            await case.backend.wait([], _ENDLESS, [CellWatch(case.queue, "g", "n")])

        async with asyncio.timeout(_DEADLINE):
            waits = [asyncio.create_task(wait()) for _ in range(3)]
            for one in waits:
                await case.until_waiting(one)
            waits[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits[0]
            await carry_out(case, put("n"))
            await asyncio.gather(*waits[1:])
