"""A process that makes a delayed message due dies between any two changes of the store."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import State
from tests.fault.harness import KILL, MOVES, QUEUE, Books, Launcher, fault

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STEPS = range(1, 60)


def test_a_message_that_was_being_made_due_is_neither_lost_nor_stored_twice(tmp_path: Path, launcher: Launcher) -> None:
    statuses: list[int] = []
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync=off", root / "ledger"
        statuses.append(launcher.run("make_due", url, ledger, fault=fault(KILL, step, kinds=MOVES)))
        assert launcher.run("make_due", url, ledger) == 0, launcher.errors()
        asyncio.run(_check(url, step))
        assert len(Books(ledger).read("due")) <= 1, step
        if statuses[-1] == 0:
            break
    assert -signal.SIGKILL in statuses
    assert statuses[-1] == 0, f"the program has more than {len(STEPS)} steps: {launcher.errors()}"


async def _check(url: str, step: int) -> None:
    """The message is due, is leased once, and its id is known in each state."""
    backend = open_backend(url)
    (stored,) = await backend.find(QUEUE, ["late"])
    assert (stored.state, stored.message.body, stored.message.tries) == (State.READY, b"late", 0), step
    leases = await backend.lease(QUEUE, 9, 60.0)
    assert [lease.message.id for lease in leases] == ["late"], step
    (stored,) = await backend.find(QUEUE, ["late"])
    assert stored.state is State.LEASED, step
    await backend.aclose()
