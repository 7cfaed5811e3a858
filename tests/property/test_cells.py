"""Every store of cells does what a dictionary does, whatever happens in whatever order."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from qworker.cell import Cell, CellAction, CellOp, CellReply, CellWatch
from qworker.testing.harness import Harness
from tests.property.lifecycle import SETTINGS
from tests.property.test_lifecycle import emptied
from tests.support.servers import RedisHarness, RedisServer

pytestmark = pytest.mark.timeout(300)

GROUPS = ("g", "g/", "\0")
NAMES = ("a", "b", "~", "n" * 300)
# No sum of steps is a lifetime, so that nothing depends on what happens at the very moment of an expiry.
STEPS = (7.0, 50.0, 130.0)
LIFETIMES = (None, None, 33.0, 95.0)

CELLS = st.builds(
    lambda group, name, value, ttl, rank: Cell(group, name, value, ttl=ttl, rank=rank),
    st.sampled_from(GROUPS),
    st.sampled_from(NAMES),
    st.sampled_from([b"", b"\n", b"value" * 100]),
    st.sampled_from(LIFETIMES),
    st.integers(-1, 2),
)
ACTIONS = st.sampled_from([*["put"] * 5, *["delete"] * 3, "get", "list", "close"])
ONLY = st.sampled_from([None, None, "absent", "current", "stale"])


class Model(NamedTuple):
    """A cell of the model, and when it expires."""

    cell: Cell
    expires_at: float


class Cells(RuleBasedStateMachine):
    """Batches of operations by two processes, and time that passes."""

    def __init__(self, make: Callable[[], Harness]) -> None:
        super().__init__()
        self.make = make

    @initialize()
    def open_two(self) -> None:
        self.runner = asyncio.Runner()
        self.queue = f"cells-{secrets.token_hex(6)}"
        self.harness = self.make()
        self.backends = [self.runner.run(self.harness.open()) for _ in range(2)]
        self.now = 0.0
        self.stored: dict[tuple[str, str], Model] = {}
        self.versions: set[str] = {"never"}

    def find(self, group: str, name: str) -> Cell | None:
        found = self.stored.get((group, name))
        return None if found is None or found.expires_at <= self.now else found.cell

    def names(self, group: str) -> list[str]:
        return sorted(name for one, name in self.stored if one == group and self.find(one, name) is not None)

    @rule(
        ops=st.lists(st.tuples(ACTIONS, CELLS, ONLY, st.integers(0, 99)), min_size=1, max_size=6),
        by=st.sampled_from([0, 1]),
    )
    def carry_out(self, ops: list[tuple[CellAction, Cell, str | None, int]], by: int) -> None:
        batch = [CellOp(do, cell, self.condition(cell, only, number)) for do, cell, only, number in ops]
        replies = self.runner.run(self.backends[by].cells(self.queue, batch))
        assert len(replies) == len(batch)
        for op, reply in zip(batch, replies, strict=True):
            getattr(self, op.do)(op, reply)

    def condition(self, cell: Cell, only: str | None, number: int) -> str | None:
        """The version of a condition, as a caller knows it before the batch."""
        if only == "absent":
            return ""
        if only == "stale":
            return sorted(self.versions)[number % len(self.versions)]
        found = self.find(cell.group, cell.name)
        return found.version if only == "current" and found is not None else None

    def is_refused(self, op: CellOp, stored: Cell | None) -> bool:
        return op.only is not None and op.only != ("" if stored is None else stored.version)

    def check(self, shown: Cell | None, stored: Cell | None) -> None:
        """Compare a cell of a reply with that of the model."""
        assert (shown is None) == (stored is None)
        if shown is not None and stored is not None:
            assert (shown.group, shown.name, shown.value) == (stored.group, stored.name, stored.value)
            assert (shown.version, shown.rank) == (stored.version, stored.rank)
            expires_at = self.stored[stored.group, stored.name].expires_at
            assert (shown.ttl or 1e9) == pytest.approx(min(expires_at - self.now, 1e9), abs=1.0)

    def get(self, op: CellOp, reply: CellReply) -> None:
        stored = self.find(op.cell.group, op.cell.name)
        assert reply.done == (stored is not None)
        self.check(reply.cell, stored)

    def put(self, op: CellOp, reply: CellReply) -> None:
        stored = self.find(op.cell.group, op.cell.name)
        refused = self.is_refused(op, stored) or (stored is not None and op.cell.rank < stored.rank)
        assert reply.done == (not refused)
        if refused:
            self.check(reply.cell, stored)
            return
        assert reply.cell is not None
        assert reply.cell.version not in self.versions
        self.versions.add(reply.cell.version)
        expires_at = 1e12 if op.cell.ttl is None else self.now + op.cell.ttl
        self.stored[op.cell.group, op.cell.name] = Model(reply.cell, expires_at)
        self.check(reply.cell, self.find(op.cell.group, op.cell.name))

    def delete(self, op: CellOp, reply: CellReply) -> None:
        stored = self.find(op.cell.group, op.cell.name)
        refused = stored is None or self.is_refused(op, stored)
        assert reply.done == (not refused)
        if refused:
            self.check(reply.cell, stored)
        else:
            del self.stored[op.cell.group, op.cell.name]

    def list(self, op: CellOp, reply: CellReply) -> None:
        names = [name for name in self.names(op.cell.group) if name > op.cell.name]
        assert [cell.name for cell in reply.cells] == names
        assert reply.done
        assert reply.empty
        for cell in reply.cells:
            self.check(cell, self.find(cell.group, cell.name))

    def close(self, op: CellOp, reply: CellReply) -> None:
        assert reply == CellReply(not self.names(op.cell.group), empty=not self.names(op.cell.group))

    @rule(by=st.sampled_from([0, 1]))
    def list_groups(self, by: int) -> None:
        (reply,) = self.runner.run(self.backends[by].cells(self.queue, [CellOp("list", Cell("", ""))]))
        assert [cell.group for cell in reply.cells] == sorted(group for group in GROUPS if self.names(group))

    @rule(seconds=st.sampled_from(STEPS))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.runner.run(self.harness.advance(seconds))

    @rule(by=st.sampled_from([0, 1]))
    def reap(self, by: int) -> None:
        assert self.runner.run(self.backends[by].reap(self.queue)).returned == 0

    @precondition(lambda self: len(self.versions) > 1)
    @rule(group=st.sampled_from(GROUPS), name=st.sampled_from(NAMES))
    def wait(self, group: str, name: str) -> None:
        """A wait for a version that is not stored ends at once, and would else last for minutes."""
        found = self.find(group, name)
        watch = CellWatch(self.queue, group, name, "never" if found is None else "")
        self.runner.run(self.backends[0].wait([], 600.0, [watch]))

    @rule()
    def delete_queue(self) -> None:
        # Rare: it empties the model.
        if len(self.stored) > 6:
            self.runner.run(self.backends[0].delete(self.queue))
            self.stored.clear()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.harness.aclose())
            self.runner.close()


def check_cells(make: Callable[[], Harness]) -> None:
    run_state_machine_as_test(lambda: Cells(make), settings=SETTINGS)  # type: ignore[no-untyped-call]


def test_the_memory_does_as_a_dictionary() -> None:
    check_cells(lambda: Harness.fake(f"memory://cells-{secrets.token_hex(8)}"))


def test_a_directory_does_as_a_dictionary(tmp_path: Path) -> None:
    check_cells(lambda: Harness.fake(f"file://{tmp_path / secrets.token_hex(8)}?sync=off"))


def test_redis_does_as_a_dictionary() -> None:
    with RedisServer(stopped_clock=True) as server:
        check_cells(lambda: RedisHarness(emptied(server)))
