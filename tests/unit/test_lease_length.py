"""How long a lease lasts on a file system that hosts share."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker_file.lease_length import ClockMark, ClockMarks, LeaseTimes, shared_length

LENGTH = 30.0
MADE_AT = 1_800_000_000.0


def _mark(ahead: float, at: float) -> ClockMark:
    return ClockMark(ahead, at, at)


@pytest.mark.parametrize("ahead", [-600.0, -20.0, 0.0, 20.0, 600.0])
@pytest.mark.parametrize("age", [0.0, 10.0, 7200.0])
def test_an_extended_lease_lasts_its_length_by_any_clock(ahead: float, age: float) -> None:
    expiry = MADE_AT + ahead + LENGTH
    times = LeaseTimes(MADE_AT, MADE_AT + ahead - age)
    assert shared_length(expiry, times, [_mark(ahead, MADE_AT + 0.1)]) == (LENGTH, True)


@pytest.mark.parametrize("ahead", [-600.0, -20.0, 0.0, 20.0, 600.0])
@pytest.mark.parametrize("earlier", [0.0, 5.0, 600.0])
def test_a_new_lease_lasts_its_length_by_any_clock(ahead: float, earlier: float) -> None:
    expiry = MADE_AT + ahead + LENGTH
    # The token of an earlier lease, or the time of the publish, can be later than the holder's clock.
    times = LeaseTimes(MADE_AT, MADE_AT + ahead + earlier)
    assert shared_length(expiry, times, [_mark(ahead, MADE_AT - 7200.0)]) == (LENGTH, False)


@pytest.mark.parametrize("step", [-600.0, -20.0, 20.0, 600.0])
def test_a_step_makes_no_lease_shorter(step: float, tmp_path: Path) -> None:
    holder, folder = tmp_path / "holder", os.open(tmp_path, os.O_RDONLY)
    holder.touch()
    try:
        marks = ClockMarks(folder)
        os.utime(holder, (time.time(), time.time()))
        first = marks.of("holder")
        made_at = first[0].at + 1.0
        before = LeaseTimes(made_at, made_at)
        assert shared_length(made_at + LENGTH, before, first)[0] == pytest.approx(LENGTH, abs=0.5)
        os.utime(holder, (time.time() + step, time.time() + step))
        marks.begin_round({"holder"})
        last, previous = marks.of("holder")
        assert last.ahead - previous.ahead == pytest.approx(step, abs=0.5)
        # The holder has marked its clock again because of another lease: this one is still by the earlier clock.
        again = [_mark(last.ahead, made_at + 1.0), previous]
        assert shared_length(made_at + LENGTH, before, again)[0] >= LENGTH - 0.5
        after = LeaseTimes(made_at + 2.0, made_at + 2.0 + step)
        assert shared_length(made_at + 2.0 + step + LENGTH, after, again)[0] == pytest.approx(LENGTH, abs=0.5)
    finally:
        os.close(folder)


@pytest.mark.parametrize("ahead", [-600.0, -20.0, 0.0])
def test_a_lease_of_a_release_that_marks_no_clock_is_not_shorter(ahead: float) -> None:
    times = LeaseTimes(MADE_AT, MADE_AT + ahead)
    for marks in ([], [_mark(0.0, MADE_AT - 60.0)]):
        assert shared_length(MADE_AT + ahead + LENGTH, times, marks)[0] >= LENGTH


@pytest.mark.parametrize("remote", [False, True])
async def test_a_holder_on_a_shared_file_system_marks_its_clock(tmp_path: Path, remote: bool) -> None:
    backend = open_backend(f"file://{tmp_path}/spool?shared=1", remote_leases=remote)
    await backend.publish("work", [Draft(body=b"x")])
    began = time.time()
    (lease,) = await backend.lease("work", 1, LENGTH)
    folder = os.open(tmp_path / "spool" / "work" / "workers", os.O_RDONLY)
    try:
        (holder,) = os.listdir(folder)
        first = os.stat(holder, dir_fd=folder)
        assert backend.extend([lease], LENGTH) == []
        second = os.stat(holder, dir_fd=folder)
    finally:
        os.close(folder)
    # Some time may pass between a look at the clock and the mark.
    assert began - 1.0 < first.st_mtime < first.st_ctime + 1.0
    assert first.st_ctime - 1.0 < second.st_mtime < second.st_ctime + 1.0
    assert second.st_ctime > first.st_ctime
    await backend.aclose()


@pytest.mark.parametrize("remote", [False, True])
async def test_a_local_file_system_needs_no_mark(tmp_path: Path, remote: bool) -> None:
    backend = open_backend(f"file://{tmp_path}/spool?shared=0", remote_leases=remote)
    await backend.publish("work", [Draft(body=b"x")])
    assert len(await backend.lease("work", 1, LENGTH)) == 1
    assert len(list((tmp_path / "spool" / "work" / "workers").iterdir())) == (not remote)
    await backend.aclose()


async def test_the_mark_of_a_server_that_has_ended_stays_as_long_as_its_leases(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool?shared=1"
    server, other = open_backend(url, remote_leases=True), open_backend(url, remote_leases=True)
    await server.publish("work", [Draft(body=b"x")])
    (lease,) = await server.lease("work", 1, LENGTH)
    await server.aclose()
    workers = tmp_path / "spool" / "work" / "workers"
    assert (await other.reap("work")).returned == 0
    assert len(list(workers.iterdir())) == 1
    assert other.remote_leases is not None
    found = await other.remote_leases.find("work", lease.message.id, lease.token)
    assert found is not None
    # An extension is by the clock of the process that made it, and has its name.
    assert other.extend([found], LENGTH) == []
    assert other.extend([found], 0.0) == []
    # The first look is never the last one.
    assert (await other.reap("work")).returned == 0
    assert (await other.reap("work")).returned == 1
    reaper = open_backend(url)
    assert (await reaper.reap("work")).returned == 0
    assert len(list(workers.iterdir())) == 1, "only the mark of the instance that is open"
    await other.aclose()
    await reaper.aclose()


# -- files of holders on other hosts -----------------------------------------------------------------------------------

OTHER_BOOT = "00000000-0000-0000-0000-000000000000"


def holders(tmp_path: Path) -> dict[str, os.stat_result]:
    return {path.name: path.stat() for path in (tmp_path / "spool" / "work" / "workers").iterdir()}


async def test_the_file_of_a_dead_holder_of_another_host_is_removed_after_a_day_without_a_change(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    backend = open_backend(f"file://{tmp_path}/spool?shared=1", clock=clock)
    await backend.create("work")
    workers = tmp_path / "spool" / "work" / "workers"
    for name, line in (("dead", "refreshed"), ("locked", "refreshed"), ("living", "refreshed"), ("older-release", "")):
        (workers / name).write_text(f"{OTHER_BOOT}\n1\n{line}\n")
    with open(workers / "locked", "rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        for hour in range(24):
            await backend.reap("work")
            assert sorted(holders(tmp_path)) == ["dead", "living", "locked", "older-release"], hour
            os.utime(workers / "living")
            clock.advance(3600.0)
        await backend.reap("work")
        assert sorted(holders(tmp_path)) == ["living", "locked", "older-release"]
    await backend.aclose()


async def test_an_idle_holder_on_a_shared_file_system_changes_its_file_each_hour(tmp_path: Path) -> None:
    clock = FakeClock()
    backend = open_backend(f"file://{tmp_path}/spool?shared=1", clock=clock)
    await backend.publish("work", [Draft(body=b"x")])
    (lease,) = await backend.lease("work", 1, LENGTH)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)]) == []
    (before,) = holders(tmp_path).values()
    await backend.reap("work")
    assert [found.st_mtime for found in holders(tmp_path).values()] == [before.st_mtime]
    clock.advance(3700.0)
    await backend.reap("work")
    assert [found.st_mtime - before.st_mtime for found in holders(tmp_path).values()] == [pytest.approx(3700.0)]
    await backend.aclose()


async def test_a_holder_that_was_stopped_for_a_day_loses_no_lease_that_it_takes_afterwards(tmp_path: Path) -> None:
    url, clock = f"file://{tmp_path}/spool?shared=1", FakeClock()
    backend, other = open_backend(url, clock=clock), open_backend(url, clock=clock)
    await backend.publish("work", [Draft(body=b"1")])
    assert len(await backend.lease("work", 1, 1.0)) == 1
    (holder,) = holders(tmp_path)
    # As another host does after a day.
    (tmp_path / "spool" / "work" / "workers" / holder).unlink()
    clock.advance(25 * 3600.0)
    await backend.publish("work", [Draft(body=b"2")])
    leases = await backend.lease("work", 10, LENGTH)
    assert b"2" in [lease.message.body for lease in leases]
    assert list(holders(tmp_path)) == [holder]
    for _ in range(2):
        await other.reap("work")
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    await backend.aclose()
    await other.aclose()
