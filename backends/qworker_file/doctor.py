"""What `qworker doctor file:...` tries on the file system that holds the queues: each operation that the protocol lives on."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import select
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable

from qworker.doctor import Check, Health
from qworker.url import BackendURL

__all__ = ["doctor"]

# Seconds between this host's clock and the file server's that leases can bear without a thought.
_CLOCK_TOLERANCE_S = 2.0
_LOW_SPACE_BYTES = 100_000_000
_LOW_INODES = 10_000
_IN_CREATE = 0x100
_INOTIFY_WAIT_MS = 2000
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "afs"}
_MEMORY = {"tmpfs", "ramfs"}


async def doctor(url: BackendURL) -> list[Check]:
    """Try the directory of `url`; in a thread, since a sick file system may take its time."""
    return await asyncio.to_thread(_examine, os.fspath(url.directory))


def _examine(root: str) -> list[Check]:
    place = _nearest(root)
    checks = [_permissions(root, place), _file_system(place), _space(place), _inodes(place)]
    try:
        probe = tempfile.mkdtemp(prefix=".doctor-", dir=place)
    except OSError as error:
        return [*checks, Check("writing", Health.BROKEN, f"{place}: {error.strerror}", "give this user the directory")]
    try:
        for name, attempt in _ATTEMPTS:
            checks.append(_tried(name, attempt, probe))
    finally:
        shutil.rmtree(probe)
    return checks


def _nearest(path: str) -> str:
    """`path`, or the closest ancestor that is there: where it would be made."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _tried(name: str, attempt: Callable[[str], Check], probe: str) -> Check:
    try:
        return attempt(probe)
    except OSError as error:
        return Check(name, Health.BROKEN, f"{error.strerror or error}", "put the queues on a local file system")


def _permissions(root: str, place: str) -> Check:
    if root != place:
        return Check("directory", Health.OK, f"{root} is not there yet: it will be made in {place}")
    status = os.stat(root)
    mode = stat.S_IMODE(status.st_mode)
    detail = f"{root}, mode {mode:04o}, owner {status.st_uid}, this user {os.geteuid()}"
    if mode & stat.S_IWOTH:
        return Check("directory", Health.BROKEN, detail, f"anybody can put work there: chmod o-rwx {root}")
    if mode & stat.S_IROTH:
        return Check("directory", Health.WARN, detail, f"anybody can read the messages: chmod o-rwx {root}")
    return Check("directory", Health.OK, detail)


def _file_system(place: str) -> Check:
    kind, source = _mounted(place)
    if kind in _MEMORY:
        return Check("file system", Health.WARN, f"{kind}: memory, empty after a restart of the host", "use a disk")
    if kind in _NETWORK:
        return Check(
            "file system",
            Health.WARN,
            f"{kind}: wake-ups from other hosts do not arrive, so that rescans find their messages",
            "fine for few writers; keep the hosts' clocks together",
        )
    if kind == "ext4" and not _has_journal(place):
        return Check(
            "file system",
            Health.WARN,
            f"ext4 on {source} without a journal: a loss of power may tear a rename and lose a message",
            "tune2fs -O has_journal on the unmounted device",
        )
    return Check("file system", Health.OK, f"{kind} on {source}")


def _mounted(place: str) -> tuple[str, str]:
    """The type and source of the mount that holds `place`."""
    device = os.stat(place).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                kind, source, *_ = after.split()
                return kind, source
    # Subvolumes (btrfs) have devices of their own, which no mount shows.
    return "unknown", "unknown"


def _has_journal(place: str) -> bool:
    device = os.stat(place).st_dev
    link = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    name = os.path.basename(os.path.realpath(link))
    try:
        with open(f"/proc/fs/ext4/{name}/options", encoding="ascii") as file:
            return any(line.startswith("data=") for line in file)
    except FileNotFoundError:
        # An old kernel, or a container that hides it: journals are the rule.
        return True


def _space(place: str) -> Check:
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    total = status.f_blocks * status.f_frsize
    detail = f"{free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free"
    if free == 0:
        return Check("space", Health.BROKEN, detail, "publishing fails until there is space")
    return Check(
        "space", *((Health.WARN, detail, "make space") if free < _LOW_SPACE_BYTES else (Health.OK, detail, ""))
    )


def _inodes(place: str) -> Check:
    status = os.statvfs(place)
    if status.f_files == 0:
        return Check("inodes", Health.OK, "made as they are needed")
    detail = f"{status.f_favail:,} of {status.f_files:,} are free; each message takes one"
    if status.f_favail == 0:
        return Check("inodes", Health.BROKEN, detail, "publishing fails until files are removed")
    low = status.f_favail < _LOW_INODES
    return Check("inodes", *((Health.WARN, detail, "remove files") if low else (Health.OK, detail, "")))


# -- attempts: each raises OSError, or says what is wrong --------------------------------------------------------------


def _try_rename(probe: str) -> Check:
    first, second = os.path.join(probe, "rename-a"), os.path.join(probe, "rename-b")
    _make(first, b"whole")
    inode = os.stat(first).st_ino
    os.rename(first, second)
    if os.path.exists(first) or os.stat(second).st_ino != inode:
        return Check("rename", Health.BROKEN, "a renamed file is not the same file", "put the queues elsewhere")
    try:
        os.rename(first, second)
    except FileNotFoundError:
        return Check("rename", Health.OK, "atomic, and the second of two renames is refused")
    return Check(
        "rename", Health.BROKEN, "a second rename of a file that is gone succeeded", "put the queues elsewhere"
    )


def _try_link(probe: str) -> Check:
    first, second = os.path.join(probe, "link-a"), os.path.join(probe, "link-b")
    _make(first, b"")
    os.link(first, second)
    try:
        os.link(first, second)
    except FileExistsError:
        return Check("link", Health.OK, "never overwrites")
    return Check("link", Health.BROKEN, "a link overwrote a file", "put the queues elsewhere")


def _try_sync(probe: str) -> Check:
    began = time.perf_counter()
    path = os.path.join(probe, "sync")
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, b"x")
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    directory = os.open(probe, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return Check("fsync", Health.OK, f"a file and its directory in {(time.perf_counter() - began) * 1000:.1f} ms")


def _try_flock(probe: str) -> Check:
    path = os.path.join(probe, "flock")
    _make(path, b"")
    first = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("flock", Health.OK, "one holder at a time: a dead worker is noticed at once")
        return Check("flock", Health.BROKEN, "two holders of one exclusive lock", "mount it with working locks")
    finally:
        os.close(first)
        os.close(second)


def _try_inotify(probe: str) -> Check:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        return _inotify_refused(ctypes.get_errno())
    try:
        if libc.inotify_add_watch(descriptor, os.fsencode(probe), _IN_CREATE) < 0:
            return _inotify_refused(ctypes.get_errno())
        _make(os.path.join(probe, "inotify"), b"")
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(_INOTIFY_WAIT_MS):
            return Check(
                "inotify", Health.WARN, "no event came", "messages of foreign writers are found by rescans only"
            )
        (_, mask) = struct.unpack_from("iI", os.read(descriptor, 4096))
        return Check(
            "inotify", Health.OK, "files that others drop are noticed at once" if mask & _IN_CREATE else "odd event"
        )
    finally:
        os.close(descriptor)


def _inotify_refused(error: int) -> Check:
    mend = "messages of foreign writers are found by rescans only"
    if error in {errno.EMFILE, errno.ENOSPC}:
        mend = "all instances are in use: raise fs.inotify.max_user_instances; until then rescans find foreign messages"
    return Check("inotify", Health.WARN, os.strerror(error), mend)


def _try_clock(probe: str) -> Check:
    path = os.path.join(probe, "clock")
    before = time.time()
    _make(path, b"")
    ahead = os.stat(path).st_mtime - before
    detail = f"the file system's clock is {ahead:+.2f} s from this host's"
    if abs(ahead) > _CLOCK_TOLERANCE_S:
        return Check("clock", Health.WARN, detail, "keep both by NTP: delays and expiries are off by as much")
    return Check("clock", Health.OK, detail)


def _make(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


_ATTEMPTS: list[tuple[str, Callable[[str], Check]]] = [
    ("rename", _try_rename),
    ("link", _try_link),
    ("fsync", _try_sync),
    ("flock", _try_flock),
    ("inotify", _try_inotify),
    ("clock", _try_clock),
]
