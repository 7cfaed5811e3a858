"""A backlog that is no longer in the page cache is asked for side by side, and only then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker_file.read_ahead import ReadAhead

_HOT, _COLD = 25e-6, 300e-6


class _Names:
    """Which files were asked for."""

    def __init__(self, folder: Path, count: int) -> None:
        self.asked: list[int] = []
        self.names = [f"message-{number}" for number in range(count)]
        for name in self.names:
            (folder / name).write_bytes(b"x")

    def following(self, count: int) -> list[str]:
        self.asked.append(count)
        return self.names[:count]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_claims_of_the_usual_time_read_nothing_ahead(tmp_path: Path, directory: int) -> None:
    names = _Names(tmp_path, 3)
    ahead = ReadAhead(directory, names.following)
    for _ in range(1000):
        ahead.claimed(_HOT)
    assert names.asked == []


def test_one_slow_claim_among_fast_ones_reads_nothing_ahead(tmp_path: Path, directory: int) -> None:
    names = _Names(tmp_path, 3)
    ahead = ReadAhead(directory, names.following)
    for number in range(1000):
        ahead.claimed(_COLD if number % 4 == 0 else _HOT)
    assert names.asked == []


def test_each_file_of_a_cold_backlog_is_asked_for_once(tmp_path: Path, directory: int) -> None:
    names = _Names(tmp_path, 200)
    ahead = ReadAhead(directory, names.following)
    ahead.claimed(_HOT)
    for _ in range(3):
        ahead.claimed(_COLD)
    assert len(names.asked) == 1
    for _ in range(names.asked[0]):
        ahead.claimed(_HOT)
    assert len(names.asked) == 1, "what was asked for has not been claimed yet"
    for _ in range(3):
        ahead.claimed(_COLD)
    assert len(names.asked) == 2


def test_a_machine_that_is_slow_without_waiting_for_its_disk_is_seldom_asked_in_vain(
    tmp_path: Path, directory: int
) -> None:
    names = _Names(tmp_path, 3)
    ahead = ReadAhead(directory, names.following)
    ahead.claimed(_HOT)
    for _ in range(20_000):
        ahead.claimed(_COLD)
    assert 2 <= len(names.asked) <= 12, "asked again now and then, and not for every few claims"


def test_asking_that_helped_is_done_as_readily_again(tmp_path: Path, directory: int) -> None:
    names = _Names(tmp_path, 3)
    ahead = ReadAhead(directory, names.following)
    ahead.claimed(_HOT)
    for time in range(1, 6):
        for _ in range(3):
            ahead.claimed(_COLD)
        assert len(names.asked) == time
        for _ in range(names.asked[-1]):
            ahead.claimed(_HOT)


def test_what_is_no_readable_file_is_left_to_its_claim(tmp_path: Path, directory: int) -> None:
    names = _Names(tmp_path, 1)
    os.symlink("/etc/hostname", tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    names.names += ["link", "fifo", "gone"]
    ahead = ReadAhead(directory, names.following)
    ahead.claimed(_HOT)
    for _ in range(3):
        ahead.claimed(_COLD)
    assert len(names.asked) == 1
