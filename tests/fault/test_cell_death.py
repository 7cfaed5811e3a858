"""Cells are the old or the new one, whatever happens to the process that changes them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.cell import Cell, CellOp
from tests.fault.harness import ANY_CALL, FAIL, KILL, LOSE, MARKS, QUEUE, Books, Launcher, fault, strays
from tests.fault.programs import CHANGES, cell_value
from tests.support.depth import DEPTH, WITH_SYNC

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STEPS = range(1, 200 * DEPTH)
SYNC = pytest.mark.parametrize("sync", WITH_SYNC)


def states() -> list[dict[str, bytes]]:
    """What is stored before the first change, and after each."""
    found: list[dict[str, bytes]] = [{}]
    for number, (do, name, _) in enumerate(CHANGES):
        after = dict(found[-1])
        if do == "put":
            after[name] = cell_value(number)
        elif do == "delete":
            del after[name]
        found.append(after)
    return found


async def read(url: str) -> dict[str, bytes]:
    """The cells that are stored. A list and a get agree, and a close removes nothing."""
    backend = open_backend(url)
    (listed,) = await backend.cells(QUEUE, [CellOp("list", Cell("g", ""))])
    found = {cell.name: cell.value for cell in listed.cells}
    for name in "ab":
        (reply,) = await backend.cells(QUEUE, [CellOp("get", Cell("g", name))])
        assert (None if reply.cell is None else reply.cell.value) == found.get(name)
    (closed,) = await backend.cells(QUEUE, [CellOp("close", Cell("g", ""))])
    assert closed.empty == (not found)
    await backend.aclose()
    return found


def leftovers(spool: Path) -> list[str]:
    """Files that should not be there, once unfinished ones have grown old."""
    cells = sorted(os.listdir(spool / QUEUE / "cells" / "g")) if (spool / QUEUE / "cells" / "g").exists() else []
    return [*strays(spool), *[name for name in cells if name not in {"a", "b"}]]


@SYNC
def test_a_cell_is_the_old_or_the_new_one_if_its_writer_dies_at_any_step(
    tmp_path: Path, launcher: Launcher, sync: str
) -> None:
    expected, statuses = states(), []
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync={sync}", root / "ledger"
        statuses.append(launcher.run("cells", url, ledger, 0, fault=fault(KILL, step, kinds=ANY_CALL | MARKS)))
        acked = len(Books(ledger).acked)
        # The change that was being made has happened or not.
        assert asyncio.run(read(url)) in expected[acked : acked + 2], step
        assert launcher.run("cells", url, ledger, acked) == 0, launcher.errors()
        assert asyncio.run(read(url)) == expected[-1], step
        assert leftovers(root / "spool") == [], step
        if statuses[-1] == 0:
            break
    assert -signal.SIGKILL in statuses
    assert statuses[-1] == 0, f"the program has more than {len(STEPS)} steps: {launcher.errors()}"


@pytest.mark.parametrize(("mode", "sync"), [(FAIL, "full"), (LOSE, "off")], ids=["error", "lost reply"])
def test_a_change_is_made_once_if_any_step_reports_an_error(
    tmp_path: Path, launcher: Launcher, mode: int, sync: str
) -> None:
    expected, errors = states(), 0
    for step in STEPS:
        root = tmp_path / str(step)
        url, ledger = f"file://{root}/spool?sync={sync}", root / "ledger"
        injected = fault(mode, step, number=errno.EIO, kinds=ANY_CALL | MARKS)
        assert launcher.run("cells", url, ledger, 0, fault=injected) == 0, launcher.errors()
        assert asyncio.run(read(url)) == expected[-1], step
        assert leftovers(root / "spool") == [], step
        errors += len(Books(ledger).read("errors"))
        if not Books(ledger).read("errors") and step > 100:
            break
    assert errors > 0
