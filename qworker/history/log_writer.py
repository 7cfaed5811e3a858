"""The log of one process: an sq topic that the process creates for its first event, and appends to with plain writes.

    <root>/.history/<host>-<pid>-<nonce>/
        state, <id>.q          the topic, in the format of `sq:`
        .qworker/writer        locked with flock while a process writes the log; it contains the id of the boot
        .qworker/lock          the topic's lock, as the sq backend takes it: held for each append

When its process has exited, a process of the same host and boot continues the log. So there are never more logs than
there were processes at the same time. Nothing is synced. The write position moves after the records. If a process dies
between the two, no reader reads the rest. After a power failure a record can be damaged, which its crc shows.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
from collections.abc import Collection, Sequence

from qworker.clock import Clock
from qworker.kit.files import find_identity, make_directory, write_all, write_new
from qworker.kit.linux import boot_id
from qworker.kit.opening import open_directory, open_own, open_regular
from qworker.kit.segments.format import segment_name, split
from qworker.kit.segments.log import Log
from qworker.kit.segments.state import StateFile, encode_state

__all__ = ["LogLocked", "Writer", "is_dead", "start_log"]

_SIDE, _WRITER = ".qworker", "writer"
_SEGMENT = 4 << 20
_STATE = "state"
# Logs that are tried before a new one is created.
_MOST_TRIED = 64


class LogLocked(Exception):
    """Another program holds the topic's lock at the moment."""


class LogInUse(Exception):
    """Another process writes this log, or it cannot be continued."""


class Writer:
    """A log that this process writes.

    Args:
        root: The descriptor of the directory of logs.
        name: The name of the log.
        clock: Gives segments their ids.
        shared: Whether the group can read and delete it.
        new: Whether to create it. False: continue it.

    Raises:
        OSError: It cannot be created or opened.
        LogInUse: It cannot be continued.
    """

    def __init__(self, root: int, name: str, clock: Clock, *, shared: bool, new: bool) -> None:
        self.name = name
        self._root = root
        self._shared = shared
        self._fds: list[int] = []
        if new:
            os.mkdir(name, 0o770 if shared else 0o700, dir_fd=root)
        try:
            self._open(clock, new)
        except BaseException:
            self.close()
            raise

    def _open(self, clock: Clock, new: bool) -> None:
        folder = self._folder = self._keep_open(open_directory(self.name, self._root))
        side = self._keep_open(make_directory(_SIDE, folder))
        sign = self._keep_open(open_own(_WRITER, side, os.O_RDWR | os.O_CREAT))
        self._write_liveness(sign, new)
        self._lock = self._keep_open(open_regular("lock", side, os.O_RDWR | os.O_CREAT))
        if new:
            first = Log.make_first(folder, clock, _SEGMENT, durable=False)
            # Last: without this file, a directory is not a topic.
            write_new(_STATE, folder, encode_state(first, []), durable=False)
        self._state = StateFile(self._keep_open(open_own(_STATE, folder, os.O_RDWR)))
        self._log = Log(folder, self._state, clock, _SEGMENT, durable=False)
        if not new:
            self._truncate_tail()
        self._segment = split(self._state.place(0))[0]
        self._identity = _identity(folder)
        if self._shared and new:
            os.chmod(_SIDE, 0o770, dir_fd=folder)
            for name in (_STATE, segment_name(self._segment), f"{_SIDE}/{_WRITER}", f"{_SIDE}/lock"):
                os.chmod(name, 0o660, dir_fd=folder)

    def _write_liveness(self, sign: int, new: bool) -> None:
        """Mark the log as written by a living process."""
        boot = boot_id().encode()
        if new:
            # A process that checks whether this one lives holds it for a moment.
            fcntl.flock(sign, fcntl.LOCK_EX)
            write_all(sign, boot, 0)
            return
        try:
            fcntl.flock(sign, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogInUse from None
        # The lock of another host may not be visible here.
        if os.pread(sign, 64, 0) != boot:
            raise LogInUse

    def _truncate_tail(self) -> None:
        """Recover the records after the write position, which a dead process wrote last."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogInUse from None
        try:
            recorded = self._state.place(0)
            if self._log.looks_written(recorded):
                self._state.move(0, self._log.recover(recorded, whole=False))
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _keep_open(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    @property
    def alive(self) -> bool:
        """Whether the directory still exists: another process may have removed it."""
        return find_identity(self.name, self._root) == self._identity

    def append(self, payloads: Sequence[bytes]) -> None:
        """Append records.

        Raises:
            LogLocked: Nothing was written. Try again later.
            OSError: Nothing was written that readers see.
        """
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogLocked from None
        try:
            # The last holder of the lock may have written too.
            at = self._state.place(0)
            try:
                places, end = self._log.plan([len(payload) for payload in payloads], at)
                self._log.write(list(payloads), places, at)
            except OSError:
                self._log.undo(at)
                raise
            self._state.move(0, end)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._log.unsynced.clear()
        if split(end)[0] != self._segment:
            self._rolled(split(end)[0])

    def _rolled(self, segment: int) -> None:
        # This closes the descriptors of the earlier segments. A needed one is opened again.
        self._log.close()
        self._segment = segment
        if self._shared:
            os.chmod(segment_name(segment), 0o660, dir_fd=self._folder)

    def close(self) -> None:
        """Release the log, so that another process can continue it. Idempotent."""
        if hasattr(self, "_log"):
            self._log.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def start_log(root: int, clock: Clock, *, shared: bool, avoid: Collection[str] = ()) -> Writer:
    """Continue a log that an exited process of this host has left, except those in `avoid`, or create a new one.

    Raises:
        OSError: No log can be created.
    """
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40].strip(".-") or "host"
    ours = re.compile(rf"{re.escape(host)}-\d+-[0-9a-f]{{8}}")
    left = [name for name in os.listdir(root) if ours.fullmatch(name) and name not in avoid]
    for name in left[:_MOST_TRIED]:
        try:
            return Writer(root, name, clock, shared=shared, new=False)
        except (LogInUse, OSError):
            # If it is damaged, retention removes it later.
            continue
    return Writer(root, f"{host}-{os.getpid()}-{secrets.token_hex(4)}", clock, shared=shared, new=True)


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino


def is_dead(folder: int) -> bool:
    """Return whether no living process writes the log in this directory.

    Raises:
        OSError: It is unknown.
    """
    try:
        fd = open_regular(f"{_SIDE}/{_WRITER}", folder)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        raise
    finally:
        os.close(fd)
    return True
