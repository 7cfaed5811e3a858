"""Directories that are no stores: what every directory backend makes of one that is missing, or cannot be used."""

import errno
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import structlog

from qworker import Draft, State, bulk
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import _installed, open_backend, schemes
from qworker.errors import (
    BackendError,
    BackendUnavailable,
    PermissionDenied,
    PublishUncertain,
    QueueNotFound,
    StorageFull,
    StoreNotFound,
)
from qworker.history import log_writer as writer
from qworker.history.batch import EventBatch
from qworker.history.directory import DirectoryHistory
from qworker.history.store import HistoryOptions
from qworker.kit import own_files
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.kit.group_commit import GroupCommit
from qworker.kit.parts import make_shares
from qworker.kit.store_errors import is_final_for_message, store_error
from qworker.message import Query, Selection, SettleAction, Settlement
from qworker.tools.doctor import run_checks
from qworker_mq import settle
from qworker_sq import frames, topic
from qworker_vsqs import queue_dir

SCHEMES = ["file", "fsq", "mq", "sq", "vsqs"]


LOOKS: dict[str, Callable[[Backend], Awaitable[object]]] = {
    "stats": lambda backend: backend.stats("q"),
    "browse": lambda backend: list_messages(backend, "q", Query(State.READY)),
    "find": lambda backend: backend.find("q", ["x"]),
    "parts": lambda backend: backend.parts("q", State.READY, 2),
    "browse a part": lambda backend: list_messages(backend, "q", Query(State.READY, part=make_shares(2)[0])),
    "requeue": lambda backend: backend.requeue("q", Selection(ids=["x"])),
    "requeue by state": lambda backend: backend.requeue("q", Selection(state=State.FAILED)),
    "requeue unchanged": lambda backend: backend.requeue("q", Selection(unchanged=[])),
    "remove": lambda backend: backend.remove("q", Selection(ids=["x"])),
    "remove by state": lambda backend: backend.remove("q", Selection(state=State.READY)),
    "remove unchanged": lambda backend: backend.remove("q", Selection(unchanged=[])),
    "pause": lambda backend: backend.pause("q"),
    "resume": lambda backend: backend.resume("q"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_looking_into_a_directory_that_is_not_there_makes_none_and_names_it(scheme: str, tmp_path: Path) -> None:
    place = tmp_path / "above" / "spool"
    backend = open_backend(f"{scheme}://{place}")
    try:
        for name, look in LOOKS.items():
            with pytest.raises(StoreNotFound) as caught:
                await look(backend)
            assert isinstance(caught.value, QueueNotFound)
            assert f"queue 'q' does not exist, and neither does the directory {place}:" in str(caught.value), name
            assert caught.value.queue == "q"
        assert await backend.queues() == []
        assert await backend.history.logs() == []
        assert await backend.history.for_message("q", "x") == []
        assert await bulk.incomplete_loads(backend, "q") == []
        await backend.delete("q")
        assert backend.directory == place
        assert backend.durability
        assert not place.parent.exists()
        # Whoever publishes makes it.
        (message_id,) = await backend.publish("q", [Draft(body=b"x")])
        assert place.is_dir()
        (found,) = await backend.find("q", [message_id])
        assert found.message.body == b"x"
        with pytest.raises(QueueNotFound, match="queue 'other' does not exist"):
            await backend.stats("other")
    finally:
        await backend.aclose()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_doctor_of_a_directory_that_is_not_there_makes_none(scheme: str, tmp_path: Path) -> None:
    place = tmp_path / "spool"
    checks = {check.name: check for check in await run_checks(f"{scheme}://{place}")}
    assert checks["reachable"].health is CheckStatus.OK
    assert "which does not exist yet" in checks["reachable"].detail
    assert not place.exists()


# -- what the kernel's errors mean -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, StorageFull, "free some space"),
        (errno.EDQUOT, StorageFull, "free some space"),
        (errno.EACCES, PermissionDenied, "run as the directory's owner"),
        (errno.EROFS, PermissionDenied, "mounted read-only: remount it"),
        (errno.ENOTDIR, BackendUnavailable, "a file where a directory should be: check the URL"),
        (errno.ELOOP, BackendUnavailable, "check the URL"),
        (errno.EMFILE, BackendUnavailable, "ulimit -n"),
        (errno.EIO, BackendUnavailable, "Input/output error"),
        (errno.EBADMSG, BackendUnavailable, "Bad message"),
    ],
)
def test_an_error_of_the_kernel_says_what_to_do(number: int, kind: type[BackendError], advice: str) -> None:
    found = store_error(OSError(number, os.strerror(number)), "publish to 'q'")
    assert type(found) is kind
    assert str(found).startswith("cannot publish to 'q': ")
    assert advice in str(found)


def test_a_file_of_proc_that_is_missing_is_named_in_place_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/sys/kernel/random/boot_id")
    assert str(store_error(error, "open the spool")) == "/proc/sys/kernel/random/boot_id cannot be read: mount /proc"
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/nowhere")
    assert "mount" not in str(store_error(error, "open /proc/nowhere"))


@pytest.mark.parametrize("scheme", ["file", "fsq", "mq"])
async def test_create_refuses_a_queue_in_which_no_message_can_be_moved(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    try:
        await backend.create("q")
        monkeypatch.setattr(os, "access", lambda *args, **given: False)
        with pytest.raises(PermissionDenied, match="run as the directory's owner"):
            await backend.create("q")
    finally:
        await backend.aclose()


def _failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _failing_later(number: int) -> Callable[..., Awaitable[None]]:
    async def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EFBIG, StorageFull),
        (errno.EROFS, PermissionDenied),
        (errno.EIO, PublishUncertain),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_contents_that_cannot_be_synced_are_the_same_error_on_all(
    scheme: str, number: int, kind: type[BackendError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    try:
        await backend.create("q")
        monkeypatch.setattr(GroupCommit, "data", _failing_later(number))
        monkeypatch.setattr(topic, "_sync_data", _failing(number))
        with pytest.raises(kind, match=os.strerror(number) if number != errno.EROFS else "read-only") as caught:
            await backend.publish("q", [Draft(body=b"x")])
        assert type(caught.value) is kind
        monkeypatch.undo()
        assert await backend.lease("q", 1, 10.0) == []
    finally:
        await backend.aclose()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("scheme", ["file", "fsq", "mq", "vsqs"])
async def test_a_publish_is_uncertain_once_its_messages_are_visible(
    scheme: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    try:
        await backend.create("q")
        monkeypatch.setattr(GroupCommit, "directories", _failing_later(number))
        with pytest.raises(PublishUncertain, match="may or may not be stored"):
            await backend.publish("q", [Draft(body=b"x")])
    finally:
        await backend.aclose()


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_an_error_of_a_settlement_is_final_for_the_same_numbers_on_all(
    scheme: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    try:
        await backend.publish("q", [Draft(body=b"x")])
        (lease,) = await backend.lease("q", 1, 10.0)
        settlements = [Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="no")]
        for module in (own_files, frames, queue_dir):
            monkeypatch.setattr(module, "write_all", _failing(number))
        monkeypatch.setattr(settle, "_write_reason", _failing(number))
        with pytest.raises((BackendError, OSError)) as caught:
            await backend.settle(settlements)
        assert is_final_for_message(caught.value) is (number in {errno.ENAMETOOLONG, errno.EFBIG})
        monkeypatch.undo()
        assert await backend.settle(settlements) == []
        assert (await backend.stats("q")).failed == 1
    finally:
        await backend.aclose()


# -- file systems that cannot do all that is needed ------------------------------------------------------------------


def _refusing(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    """Let a system call answer as on a file system that has no such thing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, refuse)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize(("scheme", "given"), [("file", "an-id"), ("fsq", None)])
async def test_a_file_system_without_hard_links_is_named_as_that(
    scheme: str, given: str | None, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    _refusing(monkeypatch, "link", number)
    try:
        with pytest.raises(PermissionDenied, match="this file system has no hard links: put the queues on another one"):
            await backend.publish("q", [Draft(body=b"x", id=given)])
        assert (await backend.stats("q")).ready == 0
        assert not list((tmp_path / "spool" / "q" / "tmp").iterdir())
    finally:
        await backend.aclose()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
async def test_a_file_system_without_named_pipes_is_named_as_that(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"file://{tmp_path}/spool")
    _refusing(monkeypatch, "mkfifo", number)
    try:
        with pytest.raises(PermissionDenied, match="this file system has no named pipes"):
            await backend.publish("q", [Draft(body=b"x")])
        # Nothing half made is left behind.
        assert list((tmp_path / "spool").iterdir()) == []
    finally:
        await backend.aclose()


@pytest.mark.parametrize("scheme", ["file", "fsq"])
async def test_a_file_system_without_modes_is_named_as_that(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    _refusing(monkeypatch, "fchmod", errno.EPERM)
    try:
        with pytest.raises(PermissionDenied, match="this file system has no modes like"):
            await backend.create("q")
    finally:
        await backend.aclose()


async def test_a_link_that_this_user_may_not_make_is_a_matter_of_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend(f"fsq://{tmp_path}/spool")
    await backend.create("q")
    _refusing(monkeypatch, "link", errno.EPERM)
    # The file is somebody else's.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    try:
        with pytest.raises(PermissionDenied, match="run as the directory's owner"):
            await backend.publish("q", [Draft(body=b"x")])
    finally:
        await backend.aclose()


# -- the doctor ------------------------------------------------------------------------------------------------------


async def _examined(url: str) -> dict[str, Check]:
    found = await run_checks(url)
    names = [check.name for check in found]
    assert len(names) == len(set(names)), names
    return {check.name: check for check in found}


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_doctor_tries_what_a_protocol_needs_and_no_more(scheme: str, tmp_path: Path) -> None:
    found = await _examined(f"{scheme}://{tmp_path}")
    assert found["reachable"].health is CheckStatus.OK
    needed = {"directory", "file system", "space", "inodes", "rename", "fsync", "flock", "inotify", "clock"}
    assert needed <= found.keys()
    assert ("link" in found) == (scheme in {"file", "fsq"})
    assert ("fifo" in found) == (scheme == "file")
    assert not list(tmp_path.glob(".doctor-*"))


async def test_the_doctor_names_a_file_system_without_links_pipes_and_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    for function in ("link", "mkfifo"):
        _refusing(monkeypatch, function, errno.EPERM)
    real = os.mkdir
    # As where the mode of everything is that of the mount.
    monkeypatch.setattr(os, "mkdir", lambda path, mode=0o777: (real(path, mode), os.chmod(path, 0o777))[0])
    found = await _examined(f"file://{spool}")
    assert found["link"] == Check(
        "link", CheckStatus.BROKEN, "this file system has no hard links", "put the queues on another file system"
    )
    assert found["fifo"].detail == "this file system has no named pipes"
    assert "chmod" not in found["directory"].fix
    assert "mount it with umask=0077" in found["directory"].fix


async def test_the_doctor_names_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "spool").write_bytes(b"")
    for path in (tmp_path / "spool", tmp_path / "spool" / "below"):
        found = await _examined(f"file://{path}")
        assert found["reachable"].health is CheckStatus.BROKEN
        assert "a file where a directory should be: check the URL" in found["reachable"].detail
        assert found["directory"].health is CheckStatus.BROKEN


async def test_what_is_not_installed_is_one_line_of_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    here = schemes()

    def load(point: EntryPoint) -> Any:
        if "redis" in point.value:
            raise ModuleNotFoundError("No module named 'redis'", name="redis")
        if "qworker_server" in point.value:
            raise ModuleNotFoundError("No module named 'h11'", name="h11")
        return real[type(point)](point)

    # Where the backport of importlib.metadata is installed, entry points are of its class.
    real = {type(point): type(point).load for point in _installed().values()}
    for kind in real:
        monkeypatch.setattr(kind, "load", load)
    found = {check.name: check for check in await run_checks(None)}
    assert [name for name in found if name.startswith("backend ")] == [
        f"backend {scheme}" for scheme in here if scheme in {*SCHEMES, "memory"}
    ]
    assert found["not installed"].health is CheckStatus.OK
    assert found["not installed"].detail == (
        "mq+http, mq+https (extra http); redis, redis+cluster, redis+sentinel, rediss, rfq, unix (extra redis)"
    )
    assert not [check for check in found.values() if check.health is not CheckStatus.OK and "extra" in check.detail]


# -- a machine without /proc -----------------------------------------------------------------------------------------

# What a process sees in a container or chroot whose /proc is empty.
_WITHOUT_PROC = """
import errno, os, sys

def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith("/proc/"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])

sys.addaudithook(audit)
real_stat, real_readlink = os.stat, os.readlink

def hidden(real):
    def call(path, *args, **kwargs):
        if isinstance(path, str) and path.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, *args, **kwargs)
    return call

os.stat, os.readlink = hidden(os.stat), hidden(os.readlink)
from qworker.cli.main import main
sys.exit(main())
"""


def _without_proc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_PROC, *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("scheme", ["file", "mq", "sq"])
def test_without_proc_a_line_names_what_is_missing(scheme: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"""
from qworker import Tasks
tasks = Tasks("{scheme}://./spool")
@tasks.task
async def greet() -> None: ...
""")
    for command in (["run", "app:tasks", "--burst"], ["enqueue", "app:tasks", "greet"]):
        ended = _without_proc(tmp_path, *command)
        assert ended.returncode == 3, ended.stderr
        text = "/proc/sys/kernel/random/boot_id cannot be read: mount /proc [BackendUnavailable]"
        assert ended.stderr.splitlines()[-1] == f"qworker: {text}"
        assert "Traceback" not in ended.stderr


def test_the_doctor_without_proc_says_what_it_cannot_know(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    ended = _without_proc(tmp_path, "doctor", "file://./spool")
    assert ended.returncode == 3, ended.stderr
    assert "BROKEN reachable: /proc/sys/kernel/random/boot_id cannot be read: mount /proc" in ended.stdout
    assert "warn   file system: unknown: /proc/self/mountinfo cannot be read: mount /proc" in ended.stdout
    assert "inotify instances: unknown: /proc/sys/fs/inotify/max_user_instances cannot be read" in ended.stdout
    assert "ok     rename" in ended.stdout


async def test_a_history_without_proc_pauses_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(writer, "boot_id", missing)
    history = DirectoryHistory(str(tmp_path), HistoryOptions())
    with structlog.testing.capture_logs() as logs:
        history.append([EventBatch(kind="acked", queue="q", worker="w", at=1.0, id=["x"])])
    assert [(line["event"], line["error"]) for line in logs] == [
        ("history_paused", "/proc/sys/kernel/random/boot_id cannot be read: mount /proc")
    ]
    await history.aclose()
