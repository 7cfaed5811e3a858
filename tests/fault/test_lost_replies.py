"""C10: calls that happen and report failure, as those of a network file system do whose reply is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.fault.harness import LOSE, MOVES, Launcher, drain, fault, strays

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

EVERY_THIRD = fault(LOSE, 3, number=errno.EIO, every=3, kinds=MOVES)


@pytest.mark.parametrize("batch", [1, 20])
def test_lost_replies_to_renames_and_links_neither_lose_nor_double(
    tmp_path: Path, launcher: Launcher, batch: int
) -> None:
    url, ledger = f"file://{tmp_path}/spool", tmp_path / "ledger"
    assert launcher.run("publish", url, ledger, 60, batch, fault=EVERY_THIRD) == 0, launcher.errors()
    assert launcher.run("work", url, ledger, 10, fault=EVERY_THIRD) == 0, launcher.errors()
    books = drain(url, ledger)
    assert len(books.acked) == 60
    assert books.duplicates == 0
    assert strays(tmp_path / "spool") == []
