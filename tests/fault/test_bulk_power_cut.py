"""C11 for bulk writes: the file system goes down while a load is staged, sealed or published. Then it runs again."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import harness
from tests.fault.harness import Books
from tests.support.depth import DEEP, DEPTH
from tests.support.power import image, mount_image, pull_the_plug, unmount
from tests.support.waiting import block_for, wait_for

__all__ = ["image"]

pytestmark = [pytest.mark.fault, pytest.mark.serial, pytest.mark.timeout(300)]

CYCLES = 6 * DEPTH if DEEP else 4
PARTS, ROWS = 3, 600


@pytest.fixture
def mounted(tmp_path: Path, image: Path) -> Iterator[Path]:
    mount = tmp_path / "mnt"
    mount_image(image, mount)
    try:
        yield mount
    finally:
        unmount(mount)


def test_power_cuts_in_a_bulk_write_lose_nothing_double_nothing_and_tear_nothing(
    tmp_path: Path, image: Path, mounted: Path
) -> None:
    draw = random.Random(12)
    interrupted = 0
    for cycle in range(CYCLES):
        url, ledger = f"file://{mounted}/spool-{cycle}", tmp_path / f"ledger-{cycle}"
        program = harness.start("bulk", url, ledger, PARTS, ROWS)
        try:
            _wait_for_staging(mounted / f"spool-{cycle}", draw.randrange(1, 2 * PARTS * ROWS + 200))
            block_for(draw.uniform(0.0, 0.1))
            committed = bool(Books(ledger).read("committed"))
            pull_the_plug(mounted)
        finally:
            harness.kill(program)
            unmount(mounted)
        mount_image(image, mounted)
        if committed:
            assert len(harness.stored(url)) == PARTS * ROWS, "a write that had returned was undone"
        else:
            interrupted += 1
        again = harness.start("bulk", url, ledger, PARTS, ROWS)
        assert again.wait(harness.PATIENCE) == 0
        bodies = [path.read_text() for path in (mounted / f"spool-{cycle}" / "work").glob("load-*/*/*/*")]
        assert sorted(bodies) == sorted(f"{part}.{row}" for part in range(PARTS) for row in range(ROWS)), cycle
        # Room for the next cycle.
        shutil.rmtree(mounted / f"spool-{cycle}")
    assert interrupted


def _wait_for_staging(root: Path, files: int) -> None:
    """Until so many files have been staged, or all are published."""

    def is_staged() -> bool:
        # `os.walk` passes over directories that are being removed.
        staged = sum(name.endswith("_0") for _, _, names in os.walk(root / "work/tmp") for name in names)
        return staged >= files or any((root / "work").glob("load-*"))

    wait_for(is_staged, f"{files} staged files")
