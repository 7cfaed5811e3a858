"""C11: the file system goes down under the programs without writing its cache, and is mounted again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fault import harness
from tests.fault.harness import Books, check_invariant, drain
from tests.support.depth import DEEP, DEPTH
from tests.support.power import image, mount_image, pull_the_plug, unmount
from tests.support.waiting import block_for, wait_for

__all__ = ["image"]

pytestmark = [pytest.mark.fault, pytest.mark.serial, pytest.mark.timeout(600)]

CYCLES = 30 * DEPTH if DEEP else 10


def _await_acks(books: Books, more: int, when: str) -> None:
    before = len(books.read("acked"))
    wait_for(lambda: len(books.read("acked")) >= before + more, f"progress of the publishers in {when}")


def test_power_cuts_undo_no_acknowledged_publish_and_no_acknowledged_ack(tmp_path: Path, image: Path) -> None:
    mount, ledger = tmp_path / "mnt", tmp_path / "ledger"
    url = f"file://{mount}/spool"
    draw = random.Random(11)
    acked_in_all = 0
    for cycle in range(CYCLES):
        mount_image(image, mount)
        programs = [harness.start("publish", url, ledger, 100_000, batch) for batch in (1, 8, 50)]
        programs.append(harness.start("ack", url, ledger))
        try:
            _await_acks(Books(ledger), 60, f"cycle {cycle}")
            block_for(draw.uniform(0.0, 0.2))
            pull_the_plug(mount)
        finally:
            for program in programs:
                harness.kill(program)
            unmount(mount)
    mount_image(image, mount)
    try:
        books = check_invariant(url, ledger)
        done = set(books.read("settled"))
        assert not done & set(harness.stored(url)), "an acknowledged ack was undone"
        acked_in_all = len(books.acked)
        drain(url, ledger)
    finally:
        unmount(mount)
    assert acked_in_all >= CYCLES * 60
