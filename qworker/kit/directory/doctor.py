"""The checks of `qworker doctor` on the file system of a directory: each operation that the queues need."""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from qworker.kit.directory.blocked import BlockedFile, BlockedRecords
from qworker.kit.directory.queue_files import is_queue, list_queue_names
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.kit.file_system import FileSystem
from qworker.kit.files import check_exchange, link_file, make_fifo
from qworker.kit.linux import CREATE, MOUNTINFO, add_inotify_watch, open_inotify, parse_inotify_events
from qworker.kit.opening import create_file, open_directory, open_entry, try_lock
from qworker.kit.store_errors import FULL, Unsupported, store_error
from qworker.kit.threads import BlockingCall, run_in_thread

__all__ = ["Attempt", "examine_directory", "find_blocked", "try_exchange", "try_fifo", "try_link"]

# Returns the result of the check, or raises OSError.
Attempt = Callable[[str], Check]

# Seconds by which this host's clock may differ from the file server's clock without harm.
_CLOCK_TOLERANCE_S = 2.0
_LOW_SPACE_BYTES = 100_000_000
_LOW_INODES = 10_000
_INOTIFY_WAIT_MS = 2000
_MEMORY = {"tmpfs", "ramfs"}
_ELSEWHERE = "put the queues on another file system"


async def examine_directory(
    path: str | os.PathLike[str], more: Iterable[tuple[str, Attempt]] = (), *, shared: bool | None = None
) -> list[Check]:
    """Check a directory, in a thread, because a broken file system may be slow.

    Args:
        path: An absolute path, which may not exist.
        more: Checks in addition to those for every directory.
        shared: Whether other hosts use it, if the URL says so.
    """
    return await run_in_thread(BlockingCall.CHECK, _run_checks, os.fspath(path), [*_ATTEMPTS, *more], shared)


def _bases(root: int) -> Iterator[tuple[str, str]]:
    """Yield the queues in an open root, each with the path of the directory that has its records."""
    for name in list_queue_names(root, partial(is_queue, root)):
        yield name, name


async def find_blocked(
    path: str | os.PathLike[str], bases: Callable[[int], Iterable[tuple[str, str]]] = _bases
) -> list[Check]:
    """Report the files that workers could not lease, with the reason of each. A directory without queues has none.

    Args:
        path: The directory of the queues, which may not exist.
        bases: Returns the queues in an open root, each with the path of the directory that has its records.
    """
    try:
        root = open_directory(os.fsencode(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        return [_broken("blocked messages", error, f"use {os.fspath(path)}")]
    found: list[tuple[str, BlockedFile]] = []
    unknown: list[Check] = []
    try:
        for queue, place in sorted(bases(root)):
            try:
                found += [(queue, file) for file in await _read_blocked(root, place)]
            except OSError as error:
                unknown.append(_broken("blocked messages", error, f"read the queue {queue!r}"))
    except OSError as error:
        return [_broken("blocked messages", error, f"read {os.fspath(path)}")]
    finally:
        os.close(root)
    return unknown + [
        Check(
            "blocked message",
            CheckStatus.WARN,
            f"{queue}/{file}",
            "repair, move or remove the file: workers try it again at most every 60 s",
        )
        for queue, file in found
    ] or [Check("blocked messages", CheckStatus.OK, "none")]


async def _read_blocked(root: int, place: str) -> list[BlockedFile]:
    base = open_directory(place, root)
    try:
        return await BlockedRecords(base).read()
    finally:
        os.close(base)


def _run_checks(root: str, attempts: list[tuple[str, Attempt]], shared: bool | None) -> list[Check]:
    try:
        place, status = _nearest_existing(root)
    except OSError as error:
        return [_broken("directory", error, f"use {root}")]
    if not stat.S_ISDIR(status.st_mode):
        return [Check("directory", CheckStatus.BROKEN, f"{place} is a file, not a directory", "check the URL")]
    checks = [_file_system(place, shared), _space(place), _inodes(place)]
    try:
        probe = tempfile.mkdtemp(prefix=".doctor-", dir=place)
    except OSError as error:
        return [
            _permissions(root, place, status, keeps_modes=True),
            *checks,
            _broken("writing", error, f"write to {place}"),
        ]
    try:
        # A new directory belongs to its owner alone, if the file system has modes.
        keeps_modes = not stat.S_IMODE(os.stat(probe).st_mode) & 0o077
        checks.insert(0, _permissions(root, place, status, keeps_modes=keeps_modes))
        checks += [_run_check(name, attempt, probe) for name, attempt in attempts]
        shutil.rmtree(probe)
    except OSError as error:
        checks.append(_broken("writing", error, f"remove {probe}"))
    return checks


def _nearest_existing(path: str) -> tuple[str, os.stat_result]:
    """Return `path`, or its closest ancestor that exists, where it would be created."""
    while True:
        try:
            return path, os.stat(path)
        except FileNotFoundError:
            path = os.path.dirname(path)


def _broken(name: str, error: OSError, doing: str) -> Check:
    return Check(name, CheckStatus.BROKEN, str(store_error(error, doing)))


def _run_check(name: str, attempt: Attempt, probe: str) -> Check:
    try:
        return attempt(probe)
    except OSError as error:
        fix = "free some space" if error.errno in FULL else _ELSEWHERE
        return Check(name, CheckStatus.BROKEN, f"{error.strerror or error}", fix)


def _permissions(root: str, place: str, status: os.stat_result, *, keeps_modes: bool) -> Check:
    if root != place:
        return Check("directory", CheckStatus.OK, f"{root} does not exist yet: it will be created in {place}")
    mode = stat.S_IMODE(status.st_mode)
    detail = f"{root}, mode {mode:04o}, owner {status.st_uid}, this user {os.geteuid()}"
    fix = (
        f"chmod o-rwx {root}"
        if keeps_modes
        else "this file system keeps no modes: mount it with umask=0077, or use another one"
    )
    if mode & stat.S_IWOTH:
        return Check("directory", CheckStatus.BROKEN, detail, f"every user can enqueue there: {fix}")
    if mode & stat.S_IROTH:
        return Check("directory", CheckStatus.WARN, detail, f"every user can read the messages: {fix}")
    return Check("directory", CheckStatus.OK, detail)


def _file_system(place: str, shared: bool | None) -> Check:
    name = "file system"
    system = FileSystem.of(place)
    found = system.describe(shared)
    if not system.kind:
        given = "" if shared is None else f" (?shared={shared:d})"
        fix = "no message is guaranteed to survive a power failure"
        return Check(name, CheckStatus.WARN, f"unknown: {_why_unknown()}{given}", fix)
    if system.kind in _MEMORY:
        return Check(name, CheckStatus.WARN, f"{found}: memory, empty after a restart of the host", "use a disk")
    if not system.is_local if shared is None else shared:
        return Check(
            name,
            CheckStatus.WARN,
            f"{found}: wake-ups from other hosts do not arrive, so that rescans find their messages",
            "fine for few writers; keep the hosts' clocks together, and set ?shared=0 if only this host uses it",
        )
    if not system.has_barriers:
        return Check(
            name,
            CheckStatus.WARN,
            f"{found} is mounted without barriers: a power failure may lose stored messages",
            "remount it without the option nobarrier (barrier=1)",
        )
    if system.kind in {"ext3", "ext4"} and not system.keeps_renames:
        return Check(
            name,
            CheckStatus.WARN,
            f"{found} has no journal, or does not show one: a power failure may tear a rename and lose a message",
            "tune2fs -O has_journal on the unmounted device",
        )
    return Check(name, CheckStatus.OK, found)


def _why_unknown() -> str:
    try:
        os.stat(MOUNTINFO)
    except OSError as error:
        return str(store_error(error, "read it"))
    return "the kernel does not show its mount here"


def _space(place: str) -> Check:
    status = os.statvfs(place)
    free = status.f_bavail * status.f_frsize
    total = status.f_blocks * status.f_frsize
    detail = f"{free / 1e9:.1f} GB of {total / 1e9:.1f} GB are free"
    if free == 0:
        return Check("space", CheckStatus.BROKEN, detail, "publishing fails until there is space")
    return Check(
        "space",
        *((CheckStatus.WARN, detail, "make space") if free < _LOW_SPACE_BYTES else (CheckStatus.OK, detail, "")),
    )


def _inodes(place: str) -> Check:
    status = os.statvfs(place)
    if status.f_files == 0:
        return Check("inodes", CheckStatus.OK, "created when they are needed")
    detail = f"{status.f_favail:,} of {status.f_files:,} are free; each message takes one"
    if status.f_favail == 0:
        return Check("inodes", CheckStatus.BROKEN, detail, "publishing fails until files are removed")
    low = status.f_favail < _LOW_INODES
    return Check("inodes", *((CheckStatus.WARN, detail, "remove files") if low else (CheckStatus.OK, detail, "")))


# -- attempts ----------------------------------------------------------------------------------------------------------


def _try_rename(probe: str) -> Check:
    first, second = os.path.join(probe, "rename-a"), os.path.join(probe, "rename-b")
    _make(first, b"whole")
    inode = os.stat(first).st_ino
    os.rename(first, second)
    if os.path.exists(first) or os.stat(second).st_ino != inode:
        return Check("rename", CheckStatus.BROKEN, "a renamed file is not the same file", _ELSEWHERE)
    try:
        os.rename(first, second)
    except FileNotFoundError:
        return Check("rename", CheckStatus.OK, "atomic, and the second of two renames is refused")
    return Check("rename", CheckStatus.BROKEN, "a second rename of a file that is gone succeeded", _ELSEWHERE)


def try_link(probe: str) -> Check:
    """Check that there are hard links."""
    directory = open_directory(probe)
    try:
        _make(os.path.join(probe, "link-a"), b"")
        link_file("link-a", "link-b", directory, directory)
        try:
            link_file("link-a", "link-b", directory, directory)
        except FileExistsError:
            return Check("link", CheckStatus.OK, "never overwrites")
    finally:
        os.close(directory)
    return Check("link", CheckStatus.BROKEN, "a link overwrote a file", _ELSEWHERE)


def try_exchange(probe: str) -> Check:
    """Check that two files can exchange their names."""
    directory = open_directory(probe)
    try:
        check_exchange(directory)
    except Unsupported as error:
        missing = f'{error.strerror}: calls with again="replace" or again="debounce" are refused'
        return Check("exchange", CheckStatus.WARN, missing, f'use again="keep", or {_ELSEWHERE}')
    finally:
        os.close(directory)
    return Check("exchange", CheckStatus.OK, "two files can exchange their names")


def try_fifo(probe: str) -> Check:
    """Check that there are named pipes."""
    directory = open_directory(probe)
    try:
        make_fifo("fifo", 0o600, directory)
    finally:
        os.close(directory)
    return Check("fifo", CheckStatus.OK, "an idle worker is woken")


def _try_sync(probe: str) -> Check:
    began = time.perf_counter()
    path = os.path.join(probe, "sync")
    descriptor = create_file(path, None)
    try:
        os.write(descriptor, b"x")
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    directory = open_directory(probe)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return Check("fsync", CheckStatus.OK, f"a file and its directory in {(time.perf_counter() - began) * 1000:.1f} ms")


def _try_flock(probe: str) -> Check:
    path = os.path.join(probe, "flock")
    _make(path, b"")
    # As a worker opens a message.
    first = open_entry(path, os.O_RDONLY)
    second = open_entry(path, os.O_RDONLY)
    try:
        if try_lock(first) and not try_lock(second):
            return Check("flock", CheckStatus.OK, "one holder at a time: a dead worker is noticed at once")
        return Check("flock", CheckStatus.BROKEN, "two holders of one exclusive lock", "mount it with working locks")
    finally:
        os.close(first)
        os.close(second)


def _try_inotify(probe: str) -> Check:
    directory = open_directory(probe)
    try:
        descriptor = open_inotify()
    except OSError as error:
        os.close(directory)
        return _inotify_refused(error)
    try:
        try:
            add_inotify_watch(descriptor, directory, CREATE)
        except OSError as error:
            return _inotify_refused(error)
        _make(os.path.join(probe, "inotify"), b"")
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(_INOTIFY_WAIT_MS):
            return Check(
                "inotify", CheckStatus.WARN, "no event came", "messages of foreign writers are found by rescans only"
            )
        (_, mask, _), *_ = parse_inotify_events(os.read(descriptor, 4096))
        return Check(
            "inotify", CheckStatus.OK, "files that others drop are noticed at once" if mask & CREATE else "odd event"
        )
    finally:
        os.close(descriptor)
        os.close(directory)


def _inotify_refused(error: OSError) -> Check:
    fix = "messages of foreign writers are found by rescans only"
    if error.errno in {errno.EMFILE, errno.ENOSPC}:
        fix = "all instances are in use: raise fs.inotify.max_user_instances; until then rescans find foreign messages"
    return Check("inotify", CheckStatus.WARN, str(error.strerror), fix)


def _try_clock(probe: str) -> Check:
    path = os.path.join(probe, "clock")
    before = time.time()
    _make(path, b"")
    ahead = os.stat(path).st_mtime - before
    detail = f"the file system's clock is {ahead:+.2f} s from this host's"
    if abs(ahead) > _CLOCK_TOLERANCE_S:
        return Check("clock", CheckStatus.WARN, detail, "keep both by NTP: delays and expiries are off by as much")
    return Check("clock", CheckStatus.OK, detail)


def _make(path: str, content: bytes) -> None:
    descriptor = create_file(path, None)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


_ATTEMPTS: list[tuple[str, Attempt]] = [
    ("rename", _try_rename),
    ("fsync", _try_sync),
    ("flock", _try_flock),
    ("inotify", _try_inotify),
    ("clock", _try_clock),
]
