"""Names that another program took: what is there is never written to, followed, waited for or read without end."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog.testing

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import BackendError
from qworker.history.batch import EventBatch
from qworker.kit.directory.liveness import has_died
from qworker.kit.directory.reasons import read_reason
from qworker.kit.files import read_file
from qworker.kit.opening import open_directory, open_own
from qworker.kit.own_files import write_own
from qworker.kit.settle import SettledInPart
from qworker.message import Draft, SettleAction, Settlement, State
from tests.support.immutable import make_immutable

OUTSIDE = b"precious"


def make_socket(place: Path, _outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        # The path of a socket has a length limit, that of a directory's descriptor is short.
        parent = os.open(place.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{parent}/{place.name[:60]}")
            os.rename(place.parent / place.name[:60], place)
        finally:
            os.close(parent)


def make_directory(place: Path, _outside: Path) -> None:
    place.mkdir()
    (place / "full").write_text("of something")


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "pipe": lambda place, _outside: os.mkfifo(place),
    "link": lambda place, outside: place.symlink_to(outside),
    "hard link": lambda place, outside: place.hardlink_to(outside),
    "socket": make_socket,
    "directory": make_directory,
}


@pytest.fixture(params=PLANTS)
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Path]:
    """Put something of one kind at a place, and return the outside file, to which a link leads."""

    def put(place: Path) -> Path:
        outside = tmp_path / "outside"
        outside.write_bytes(OUTSIDE)
        PLANTS[request.param](place, outside)
        return outside

    return put


@pytest.fixture(params=["file", "fsq"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path):
    opened = open_backend(f"{request.param}://{tmp_path}/spool")
    yield opened
    await opened.aclose()


async def fail_one(backend: Backend, error: str) -> str:
    (lease,) = await backend.lease("q", 1, 30.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error)]) == []
    return lease.message.id


async def test_a_message_fails_with_its_reason_whatever_is_in_the_place_of_the_reason(
    backend: Backend, plant: Callable[[Path], Path], tmp_path: Path
) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    (item,) = os.listdir(tmp_path / "spool/q/queue")
    outside = plant(tmp_path / f"spool/q/fail/.{item}.reason")
    message_id = await fail_one(backend, "no luck")
    (failed,) = await backend.find("q", [message_id])
    assert failed.error == "no luck"
    assert (await backend.stats("q")).leased == 0
    assert outside.read_bytes() == OUTSIDE


async def test_a_long_name_is_kept_whatever_is_in_its_place(plant: Callable[[Path], Path], tmp_path: Path) -> None:
    backend = open_backend(f"file://{tmp_path}/spool")
    try:
        await backend.create("q")
        name = "0" * 250
        (tmp_path / "spool/q/queue" / name).write_bytes(b"long")
        outside = plant(tmp_path / "spool/q/names" / hashlib.sha256(name.encode()).hexdigest())
        (lease,) = await backend.lease("q", 10, 30.0)
        assert (lease.message.body, lease.message.argv) == (b"long", (name,))
        assert outside.read_bytes() == OUTSIDE
    finally:
        await backend.aclose()


@pytest.fixture
def directory(tmp_path: Path):
    fd = open_directory(tmp_path)
    yield fd
    os.close(fd)


def test_what_has_the_name_of_a_holders_file_says_nothing_of_the_holder(
    plant: Callable[[Path], Path], tmp_path: Path, directory: int
) -> None:
    plant(tmp_path / "holder")
    # A regular file that nobody has locked is that of a dead holder, under whatever other name it lies.
    is_regular = stat.S_ISREG(os.lstat(tmp_path / "holder").st_mode)
    assert has_died(directory, "holder", local=True) is is_regular


def test_what_is_no_file_is_no_reason(plant: Callable[[Path], Path], tmp_path: Path, directory: int) -> None:
    plant(tmp_path / ".a.reason")
    is_regular = stat.S_ISREG(os.lstat(tmp_path / ".a.reason").st_mode)
    assert read_reason(directory, ".a.reason") == (OUTSIDE.decode() if is_regular else None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices")
def test_a_device_is_not_read(tmp_path: Path, directory: int) -> None:
    os.mknod(tmp_path / "zero", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    with pytest.raises(OSError, match="not a regular file") as raised:
        read_file("zero", directory)
    assert raised.value.errno == errno.ENXIO
    assert not has_died(directory, "zero", local=True)


def test_of_a_huge_file_in_the_place_of_a_small_one_only_the_beginning_is_read(tmp_path: Path, directory: int) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 36)
    read = read_file("huge", directory)
    assert read is not None
    assert len(read) == 1 << 20
    assert has_died(directory, "huge", local=True)


def test_a_file_with_a_second_name_is_not_opened_to_change_it(tmp_path: Path, directory: int) -> None:
    (tmp_path / "outside").write_bytes(OUTSIDE)
    (tmp_path / "own").hardlink_to(tmp_path / "outside")
    with pytest.raises(PermissionError, match="second name"):
        open_own("own", directory, os.O_WRONLY)
    os.close(write_own("own", directory, b"new"))
    os.close(open_own("own", directory, os.O_WRONLY))
    assert ((tmp_path / "own").read_bytes(), (tmp_path / "outside").read_bytes()) == (b"new", OUTSIDE)


# -- batches ---------------------------------------------------------------------------------------------------------

# Where a directory that cannot be moved keeps the outcome of one message from being stored, by the message's name in
# its queue.
TAKEN = {
    "file": (SettleAction.FAIL_PERM, "q/fail/{}"),
    "fsq": (SettleAction.ACK, "q/done/{}"),
    "vsqs": (SettleAction.FAIL_PERM, "q/.qworker/fail/{}"),
    "mq": (SettleAction.ACK, "remove/q:{}"),
}


@pytest.mark.parametrize("scheme", TAKEN)
async def test_one_settlement_that_cannot_be_stored_neither_delays_nor_repeats_its_batch(
    scheme: str, tmp_path: Path
) -> None:
    action, place = TAKEN[scheme]
    backend = open_backend(f"{scheme}://{tmp_path}/spool{'?keep_done=all' if scheme == 'fsq' else ''}")
    try:
        await backend.publish("q", [Draft(body=b"%d" % number) for number in range(5)])
        ready = {"file": "q/queue", "fsq": "q/queue", "vsqs": "q", "mq": "queues/q"}[scheme]
        names = sorted(path.name for path in (tmp_path / "spool" / ready).iterdir() if not path.is_dir())
        leases = await backend.lease("q", 5, 30.0)
        settlements = [Settlement(lease=lease, action=action, error="no luck") for lease in leases]
        taken = tmp_path / "spool" / place.format(names[2])
        make_directory(taken, tmp_path)
        make_immutable(taken, True)
        try:
            with pytest.raises(BackendError) as raised:
                await backend.settle(settlements)
        finally:
            make_immutable(taken, False)
        part = raised.value.__cause__
        assert isinstance(part, SettledInPart)
        (left,) = part.unstored
        assert (left.lease.message.body, part.refused) == (b"2", ())
        assert (await backend.stats("q")).leased == 1
        assert await backend.settle([left]) == []
        assert (await backend.stats("q")).leased == 0
    finally:
        await backend.aclose()


PLANTED = {
    **TAKEN,
    "file done": (SettleAction.ACK, "q/done/{}"),
    "fsq failed": (SettleAction.FAIL_PERM, "q/fail/{}"),
    "file retried": (SettleAction.RELEASE, "q/queue/{}"),
    "vsqs released": (SettleAction.RELEASE, "q/{}"),
    "mq failed": (SettleAction.FAIL_PERM, ".qworker/fail/q/{}"),
    "mq released": (SettleAction.RELEASE, "queues/q/{}"),
}


@pytest.mark.parametrize("case", PLANTED)
async def test_a_directory_in_the_place_of_a_message_holds_up_no_settlement(case: str, tmp_path: Path) -> None:
    action, place = PLANTED[case]
    scheme = case.split(maxsplit=1)[0]
    backend = open_backend(f"{scheme}://{tmp_path}/spool{'?keep_done=all' if scheme in {'file', 'fsq'} else ''}")
    try:
        (message_id,) = await backend.publish("q", [Draft(body=b"kept")])
        ready = {"file": "q/queue", "fsq": "q/queue", "vsqs": "q", "mq": "queues/q"}[scheme]
        (name,) = [path.name for path in (tmp_path / "spool" / ready).iterdir() if not path.is_dir()]
        (lease,) = await backend.lease("q", 1, 30.0)
        planted = tmp_path / "spool" / place.format(name)
        make_directory(planted, tmp_path)
        with structlog.testing.capture_logs() as lines:
            assert await backend.settle([Settlement(lease=lease, action=action, error="no luck")]) == []
        assert [line["event"] for line in lines] == ["directory_moved_aside"]
        assert (planted.parent / lines[0]["moved_to"] / "full").read_text() == "of something"
        stats = await backend.stats("q")
        assert stats.leased == 0
        if action is SettleAction.RELEASE:
            assert [again.message.body for again in await backend.lease("q", 1, 30.0)] == [b"kept"]
        elif action is SettleAction.FAIL_PERM:
            (failed,) = await backend.find("q", [message_id])
            assert (failed.state, failed.message.body, failed.error) == (State.FAILED, b"kept", "no luck")
    finally:
        await backend.aclose()


SHARED_FILES = {
    "the state of a topic": ("sq", "q/state"),
    "a segment of a topic": ("sq", "q/*.q"),
    "the state of a log of the history": ("file", ".history/*/state"),
}


@pytest.mark.parametrize("case", SHARED_FILES)
async def test_a_file_with_a_second_name_is_not_written_in_place(case: str, tmp_path: Path) -> None:
    scheme, pattern = SHARED_FILES[case]
    before = open_backend(f"{scheme}://{tmp_path}/spool?history=1")
    await record_one(before)
    await before.aclose()
    (path,) = (tmp_path / "spool").glob(pattern)
    (tmp_path / "outside").hardlink_to(path)
    content = path.read_bytes()
    after = open_backend(f"{scheme}://{tmp_path}/spool?history=1")
    try:
        if scheme == "sq":
            with pytest.raises(BackendError, match="second name"):
                await record_one(after)
        else:
            # The history goes on in another log.
            await record_one(after)
    finally:
        await after.aclose()
    assert (tmp_path / "outside").read_bytes() == content


async def record_one(backend: Backend) -> None:
    await backend.publish("q", [Draft(body=b"x")])
    backend.history.append([EventBatch(kind="acked", queue="q", worker="w", at=1.0, id=["1"])])


async def test_a_lease_state_in_a_directory_of_others_is_not_another_file(tmp_path: Path) -> None:
    backend = open_backend(f"mq://{tmp_path}/spool")
    try:
        (message_id,) = await backend.publish("q", [Draft(body=b"x")])
        await backend.aclose()
        states = tmp_path / "spool/.qworker/lease"
        states.chmod(0o770)
        (tmp_path / "outside").write_bytes(OUTSIDE)
        (states / f"q:{message_id}").hardlink_to(tmp_path / "outside")
        assert await backend.lease("q", 1, 30.0) == []
        assert (tmp_path / "outside").read_bytes() == OUTSIDE
        assert (await backend.stats("q")).ready == 1
    finally:
        await backend.aclose()
