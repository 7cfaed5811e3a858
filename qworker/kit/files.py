"""Durable file operations that directory backends share: one place that knows what `fsync` means.

A commit has two phases. The data of new files is put on the disk first, then the caller renames them into sight, then the
directories are put on the disk. Renaming before the data is there shows empty messages after a power cut. What is pending when a
sync starts rides on it, whoever asked: publishes, settlements and failures share their commits (`GroupCommit`).

A failed sync is final. The kernel drops the pages it could not write and calls the next sync a success, so a file whose sync failed
is never synced again: its publish fails, and a repetition writes another file.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import queue
import resource
import secrets
import signal
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Self

from qworker.errors import BackendError, BackendUnavailable, PermissionDenied, StorageFull
from qworker.kit.mounts import Mount, ext4_options, find_mount

__all__ = [
    "CREATE",
    "DIRECTORY",
    "FULL",
    "NETWORK",
    "READ",
    "FileSystem",
    "GroupCommit",
    "Unsupported",
    "boot_id",
    "change_mode",
    "check_writable",
    "close_all",
    "durability_at",
    "files_at_once",
    "has_writer",
    "hide_directory",
    "is_finished",
    "link_file",
    "list_names",
    "make_fifo",
    "name_slices",
    "raise_file_limit",
    "read_all",
    "read_file",
    "store_error",
    "store_errors",
    "sync_file_system",
    "write_all",
]

# No link is followed, no FIFO blocks, nothing is inherited by a program that a handler starts.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

# Files of one batch.
_BATCH = 1000
# From this many files on, one `syncfs` is cheaper than a sync of each; on ext4, where `_file_range` saves a commit, later.
_MANY, _MANY_ORDERED = 16, 256
# How many directory entries are read before others on the loop get their turn; about 1 ms.
_SLICE = 1000

# No room on the disk, or none for this user.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What to make of the kernel's errors: what is wrong, where it does not say it well itself, and what to do. All others may be over at
# the next try.
_MEANING: dict[int, tuple[type[BackendError], str, str]] = {
    **dict.fromkeys(FULL, (StorageFull, "", "free some space, or purge what is done")),
    errno.EFBIG: (StorageFull, "", "a file of this size is not allowed by the file system, or by `ulimit -f`"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        (PermissionDenied, "", "run as the directory's owner, or let its group write to it"),
    ),
    errno.EROFS: (
        PermissionDenied,
        "the file system is mounted read-only",
        "remount it, or choose another directory",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST),
        (BackendUnavailable, "there is a file where a directory should be", "check the URL"),
    ),
    errno.ELOOP: (BackendUnavailable, "", "check the URL, and links in its path"),
    errno.ENAMETOOLONG: (BackendUnavailable, "", "check the URL"),
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE),
        (BackendUnavailable, "", "raise the limit of open files (`ulimit -n`), or publish fewer messages at once"),
    ),
}

# No leases on this file system, or not on somebody else's file.
_NO_LEASES = frozenset({errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
# How a file system says that it has no such thing.
_NOT_THERE = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})
# Seconds without a change after which a file is finished, where the kernel does not tell.
_QUIET = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syncfs.argtypes = [ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "afs", "virtiofs"})
_JOURNALED = frozenset({"xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs"})
# Mount options of ext4, xfs and btrfs; of ext3; of reiserfs; of f2fs.
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0", "barrier=none", "fsync_mode=nobarrier"})


# -- errors ----------------------------------------------------------------------------------------------------------


class Unsupported(OSError):
    """The file system cannot do what a queue needs.

    Args:
        what: it has not, in the plural.
    """

    def __init__(self, what: str) -> None:
        super().__init__(errno.EOPNOTSUPP, f"this file system has no {what}")


def store_error(error: OSError, doing: str) -> BackendError:
    """The error of the tree that an `OSError` of the store is; attach the cause with `raise ... from error`.

    Returns:
        `StorageFull`: no space, inodes or quota are left. `PermissionDenied`: the directory cannot be used by this user, or at all.
        `BackendUnavailable`: everything else, for it may be over at the next try.
    """
    # Those that qworker reads itself; a queue may be named that lies under /proc, too.
    if isinstance(error.filename, str) and error.filename.startswith(("/proc/sys/", "/proc/self/")):
        return BackendUnavailable(f"{error.filename} cannot be read: mount /proc")
    if isinstance(error, Unsupported):
        what = f"{error.strerror}: put the queues on another one (`qworker doctor URL` tries what they need)"
        return PermissionDenied(f"cannot {doing}: {what}")
    kind, what, advice = _MEANING.get(error.errno or 0, (BackendUnavailable, "", ""))
    reason = f"cannot {doing}: {what or error.strerror or error}"
    return kind(f"{reason}: {advice}" if advice else reason)


class store_errors:  # noqa: N801 - reads as a statement: `with store_errors("list the queue"):`
    """Let every `OSError` of the block arrive as a `BackendError`; `doing` completes "cannot ..."."""

    # No generator: every call of a directory backend passes here, several times per message to an idle worker.
    __slots__ = ("_doing",)

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise store_error(error, self._doing) from error


def check_writable(directory: int) -> None:
    """Find out early that nothing can be written to a directory.

    Raises:
        OSError: nothing can: EROFS, EACCES.
    """
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory, effective_ids=True):
        read_only = os.fstatvfs(directory).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number))


def raise_file_limit() -> int:
    """Let this process have as many open files as it may; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            # Refused (some systems cap an unlimited one): what there is must do.
            return soft
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def files_at_once() -> int:
    """How many files one batch may have open: most of what this process may open is for everything else."""
    return max(1, min(_BATCH, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


# -- reading and writing ---------------------------------------------------------------------------------------------


def write_all(fd: int, body: bytes) -> None:
    """Write the whole of `body`; a short write is continued (a disk that fills up gives one before ENOSPC)."""
    written = os.write(fd, body)
    if written < len(body):
        rest = memoryview(body)[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]


def read_all(fd: int, size: int) -> bytes:
    """Read to the end of a file that had `size` bytes."""
    body = os.read(fd, size + 1)
    if len(body) == size:
        return body
    parts = [body]
    while body:
        body = os.read(fd, 1 << 20)
        parts.append(body)
    return b"".join(parts)


def read_file(name: str, directory: int) -> bytes | None:
    """The content of a small file; None where there is none."""
    try:
        fd = os.open(name, READ, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        return read_all(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def hide_directory(name: str, parent: int) -> str | None:
    """Take a directory out of sight for good, by one rename, so that nobody sees half of it while it is removed.

    Returns:
        Its name from now on, which no queue can have; None where it is gone: somebody else was faster.
    """
    hidden = f".{secrets.token_hex(8)}.gone"
    try:
        os.rename(name, hidden, src_dir_fd=parent, dst_dir_fd=parent)
    except FileNotFoundError:
        return None
    os.fsync(parent)
    return hidden


def link_file(source: str, target: str, source_dir: int, target_dir: int) -> None:
    """Give a file a second name, never over another one's; a link is not followed.

    Raises:
        Unsupported: the file system has no hard links.
        OSError: it cannot be done; `FileExistsError`: the name is taken.
    """
    try:
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)
    except OSError as error:
        if error.errno in _NOT_THERE:
            found = os.stat(source, dir_fd=source_dir, follow_symlinks=False)
            # A directory has one name only, and another user's file is protected, on every file system.
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                raise Unsupported("hard links") from error
        raise


def change_mode(directory: int, mode: int) -> None:
    """Give a new directory of ours a mode, whatever the umask says.

    Raises:
        Unsupported: the file system keeps no such modes.
        OSError: it cannot be done.
    """
    try:
        os.fchmod(directory, mode)
    except PermissionError as error:
        if os.fstat(directory).st_uid == os.geteuid():
            raise Unsupported(f"modes like {mode:04o}") from error
        raise


def make_fifo(name: str, mode: int, directory: int) -> None:
    """Make a named pipe.

    Raises:
        Unsupported: the file system has none.
        OSError: it cannot be made; `FileExistsError`: the name is taken.
    """
    try:
        os.mkfifo(name, mode, dir_fd=directory)
    except OSError as error:
        # EIO is the answer of file systems that are programs.
        if error.errno in _NOT_THERE or error.errno == errno.EIO:
            raise Unsupported("named pipes") from error
        raise


def close_all(fds: list[int]) -> None:
    """Close descriptors that nothing was written to, so that no error is left to be told, and empty the list.

    Neighbours take one call, which is half of the cost.
    """
    fds.sort()
    first = 0
    for last, fd in enumerate(fds):
        if last + 1 == len(fds) or fds[last + 1] != fd + 1:
            os.closerange(fds[first], fd + 1)
            first = last + 1
    fds.clear()


async def list_names(directory: int) -> list[str]:
    """Every name in a directory, unsorted, read in slices so that the loop stays free.

    A directory in which others rename may be shown without some of its files: never conclude from an absence.
    """
    names: list[str] = []
    async for some in name_slices(directory):
        names += some
    return names


async def name_slices(directory: int) -> AsyncIterator[list[str]]:
    """The names of `list_names`, in lists of bounded size."""
    names: list[str] = []
    # A descriptor of its own: a listing in slices would share its position with every other listing of the same one.
    fd = os.open(".", DIRECTORY, dir_fd=directory)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) == _SLICE:
                    yield names
                    names = []
                    await asyncio.sleep(0)
            yield names
    finally:
        os.close(fd)


def has_writer(fd: int) -> bool | None:
    """Whether any process has a file open for writing, or is about to; None where that cannot be told.

    Raises:
        OSError: for another reason than a file of somebody else's, or a file system without leases.
    """
    try:
        # Whoever opens it meanwhile makes the kernel signal us: not with SIGIO, which kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        # Refused while anybody has the file open for writing.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        # Whoever has come in between waits for the lease to go, and would write into what we are about to read.
        comes = fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return comes
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in _NO_LEASES:
            return None
        raise


def is_finished(name: str, directory: int) -> bool | None:
    """Whether nobody writes the file any more; None for what is gone, or no regular file.

    Where the kernel cannot tell of writers, a file that has been quiet for a second is finished.
    """
    try:
        fd = os.open(name, READ, dir_fd=directory)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP, errno.ENXIO}:
            return None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return None
        try:
            written = has_writer(fd)
        except OSError:
            # Whatever the reason, the kernel does not tell: the file's age decides.
            written = None
        return time.time() - found.st_mtime > _QUIET if written is None else not written
    finally:
        os.close(fd)


def boot_id() -> str:
    """What names this start of the machine; the same in all its containers.

    Raises:
        OSError: /proc is not mounted.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


# -- what the file system promises -----------------------------------------------------------------------------------


class FileSystem:
    """The file system that a directory is on, and what a sync on it is worth; `kind` is empty where the kernel does not show it."""

    __slots__ = ("has_barriers", "is_local", "is_ordered", "keeps_renames", "kind", "source")

    def __init__(self, directory: int) -> None:
        mount = _mount_of(directory)
        self.kind = "" if mount is None else mount.kind
        self.source = "" if mount is None else mount.source
        options = frozenset[str]() if mount is None else mount.options
        if self.kind in {"ext4", "ext3"}:
            options |= ext4_options(os.fstat(directory).st_dev, self.source)
        journal = {option for option in options if option.startswith("data=")}
        # A synced rename is found after a power cut. Without a journal a torn one can lose a file that was there.
        self.keeps_renames = bool(journal) or self.kind in _JOURNALED
        # A sync waits until the disk has emptied its cache. Without it a sync survives the system, and not a power cut.
        self.has_barriers = options.isdisjoint(_NO_BARRIERS)
        # ext4 in its usual mode: a journal commit carries everything that was allocated before it (`GroupCommit.data`).
        self.is_ordered = "data=ordered" in journal
        self.is_local = self.kind not in NETWORK and not self.kind.startswith("fuse")

    @property
    def survives_power_loss(self) -> bool:
        """Whether what was synced is found after a power cut, as far as the file system is concerned."""
        return self.keeps_renames and self.has_barriers

    @classmethod
    def of(cls, path: str) -> Self:
        """The file system of a directory, or of the nearest one above it that exists; nothing is left open.

        Raises:
            OSError: it cannot be opened.
        """
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        # One that this user may not read is on a file system all the same.
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return cls(fd)
        finally:
            os.close(fd)


def durability_at(path: str, *, sync: bool) -> str:
    """The `Backend.durability` of a directory: `disk` if it is synced on a file system that keeps what was synced, else `process`.

    Raises:
        BackendError: it cannot be looked at.
    """
    if not sync:
        return "process"
    with store_errors(f"open {path}"):
        return "disk" if FileSystem.of(path).survives_power_loss else "process"


def _mount_of(directory: int) -> Mount | None:
    try:
        return find_mount(os.readlink(f"/proc/self/fd/{directory}"))
    except OSError:
        # Without /proc nothing is known, and nothing promised: `qworker doctor` gives the reason.
        return None


# -- group commit ----------------------------------------------------------------------------------------------------


class _Request:
    """What one caller waits for."""

    __slots__ = ("directories", "done", "error", "files")

    def __init__(self, files: Sequence[int], directories: Collection[int], done: asyncio.Future[None]) -> None:
        self.files = files
        self.directories = directories
        self.done = done
        self.error: OSError | None = None


class GroupCommit:
    """Syncs descriptors for everybody on one event loop, in one thread, one round after another.

    A round takes all that was asked for before it started, and nothing later. The thread runs nothing but the long waits: every
    system call in it gives the GIL away and has to win it back from a busy loop.

    Args:
        directory: any descriptor of the file system, open as long as this object: `syncfs` reports the errors since its opening.
        system: what the file system promises.
    """

    def __init__(self, directory: int, system: FileSystem) -> None:
        self._directory = directory
        self._ordered = system.is_ordered
        self._many = _MANY_ORDERED if self._ordered else _MANY
        self._pending: list[_Request] = []
        self._rounds: queue.SimpleQueue[list[_Request] | None] = queue.SimpleQueue()
        self._running = False
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()

    async def data(self, files: Sequence[int]) -> None:
        """Put the contents of new files on the disk, so that they may be renamed into sight.

        Raises:
            OSError: one of them was not written; sync it never again.
        """
        await self._sync(files, ())

    async def directories(self, directories: Collection[int]) -> None:
        """Put what was renamed, linked and unlinked in directories on the disk.

        Raises:
            OSError: the outcome is unknown.
        """
        await self._sync((), directories)

    async def both(self, files: Sequence[int], directories: Collection[int]) -> None:
        """Put contents that need not be there before their names, and names, on the disk in one commit.

        Raises:
            OSError: the outcome is unknown; sync none of the files again.
        """
        await self._sync(files, directories)

    async def _sync(self, files: Sequence[int], directories: Collection[int]) -> None:
        request = _Request(files, directories, self._loop.create_future())
        self._pending.append(request)
        if not self._running:
            # Later in this turn of the loop, so that what others ask for in the same turn rides along.
            self._running = True
            self._loop.call_soon(self._start_round)
        cancelled: asyncio.CancelledError | None = None
        while not request.done.done():
            try:
                await asyncio.shield(request.done)
            except asyncio.CancelledError as error:
                # The thread uses the descriptors: they must stay open until it is done with them.
                cancelled = error
        if cancelled is not None:
            raise cancelled
        if request.error is not None:
            raise request.error

    def _start_round(self) -> None:
        requests, self._pending = self._pending, []
        if not requests:
            self._running = False
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="qworker-commit", daemon=True)
            self._thread.start()
        self._rounds.put(requests)

    def _work(self) -> None:
        while (requests := self._rounds.get()) is not None:
            self._run(requests)
            try:
                self._loop.call_soon_threadsafe(self._end_round, requests)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                return

    def _end_round(self, requests: list[_Request]) -> None:
        for request in requests:
            if not request.done.done():
                request.done.set_result(None)
        self._start_round()

    def _run(self, requests: list[_Request]) -> None:
        """In the thread: one round."""
        files = sum(len(request.files) for request in requests)
        if files >= self._many:
            error = _syncfs(self._directory)
            for request in requests:
                request.error = error
            return
        if self._ordered:
            # The disk writes the contents while the journal commits the directories.
            _each(requests, _start_writing)
        done: dict[int, OSError | None] = {}
        for request in requests:
            for fd in request.directories:
                if fd not in done:
                    done[fd] = _fsync(fd)
                request.error = request.error or done[fd]
        _each(requests, _finish_writing if self._ordered else _fsync)

    async def aclose(self) -> None:
        """End the thread, after everything that was asked for. Idempotent."""
        while self._running:
            await asyncio.sleep(0.001)
        if self._thread is not None:
            self._rounds.put(None)
            self._thread.join()
            self._thread = None


def _each(requests: list[_Request], step: Callable[[int], OSError | None]) -> None:
    for request in requests:
        for fd in request.files:
            # After its first error a file is not touched again, nor are those of the same batch: the batch has failed.
            if request.error is not None:
                break
            request.error = step(fd)


def _fsync(fd: int) -> OSError | None:
    try:
        os.fsync(fd)
    except OSError as error:
        return error
    return None


# On ext4 with data=ordered, contents whose blocks are allocated and written out before a rename are as durable as the rename: the
# journal commit that carries the rename (the sync of the directory) carries every earlier allocation too, and flushes the disk's
# cache before its commit record. So one commit does where two `fsync`s need two. The wait must come before the rename: with
# dioread_nolock a written extent counts only after its conversion, which the end of the write-out includes.


def _start_writing(fd: int) -> OSError | None:
    return _file_range(fd, _WRITE)


def _finish_writing(fd: int) -> OSError | None:
    return _file_range(fd, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)


def _file_range(fd: int, flags: int) -> OSError | None:
    if _libc.sync_file_range(fd, 0, 0, flags) == 0:
        return None
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def sync_file_system(fd: int) -> None:
    """Put everything that was written to a file system on the disk; blocks for long.

    Args:
        fd: any descriptor there, opened before the first of the writes that matter: errors are reported since then.

    Raises:
        OSError: something was not written, and will not be by another try.
    """
    error = _syncfs(fd)
    if error is not None:
        raise error


def _syncfs(fd: int) -> OSError | None:
    if _libc.syncfs(fd) == 0:
        return None
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
