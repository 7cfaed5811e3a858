"""One queue's directory, and `.qworker/` in it: what the protocol has no place for.

    <queue>/<id>, <id>.<expiry>, <id>.new     the protocol's
    <queue>/.qworker/lock                     flock around what reads and then writes a note
    <queue>/.qworker/notes/<id>               tries, reason, and what an expiry in the name means
    <queue>/.qworker/fail/<id>                messages that failed for good
    <queue>/.qworker/down                     the queue is paused

Names are the state, and every transition is one rename from a name that says the expiry it was leased to: that name is the
compare-and-swap key. A note is written before the rename that it belongs to, and names the expiry (`after`) that it counts,
so that a crash between the two neither loses nor doubles a try.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import AsyncGenerator, Callable

import msgspec

from qworker.kit.files import list_names, read_all, write_all
from qworker_vsqs.names import leased_name, parse
from qworker_vsqs.window import Window

__all__ = ["Folder", "Note"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Notes that are read without a turn of the loop.
_NOTES_AT_ONCE = 100
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Note(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What is known of a message beside its name."""

    tries: int = 0
    # The expiry of the lease whose end is counted in `tries` already.
    after: int | None = None
    # An expiry in the name that is no lease's but a delay's.
    due: int | None = None
    error: str | None = None
    # Unix seconds.
    enqueued_at: float | None = None
    failed_at: float | None = None
    # The message's id in the store that it came from.
    origin: str | None = None


_decode = msgspec.json.Decoder(Note).decode
_NOTHING = Note()


class Folder:
    """An open queue.

    Args:
        root: descriptor of the store's directory; stays the caller's.
        name: the queue's name, checked.
    """

    def __init__(self, root: int, name: str) -> None:
        self.name = name
        self.window = Window()
        self.refreshing = asyncio.Lock()
        self.last_id = 0
        # Until the first sync of a note: the entries of the side directories may not be durable.
        self._new = True
        self._root = root
        self._gate = asyncio.Lock()
        # See `origins`.
        self._origins: dict[str, str] | None = None
        self._descriptors: list[int] = []
        try:
            self.fd = self._held(os.open(name, _DIRECTORY, dir_fd=root))
            found = os.fstat(self.fd)
            self._identity = (found.st_dev, found.st_ino)
            self.side = self._held(_made(".qworker", self.fd))
            self.notes = self._held(_made("notes", self.side))
            self.fail = self._held(_made("fail", self.side))
            self._lock = self._held(
                os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.side)
            )
        except OSError:
            self.close()
            raise

    def _held(self, fd: int) -> int:
        self._descriptors.append(fd)
        return fd

    def close(self) -> None:
        """Let go of the descriptors. Idempotent."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def touched(self, *, noted: bool) -> tuple[int, ...]:
        """The directories that a change of state touches, and whose sync makes it durable."""
        if not noted:
            return (self.fd,)
        new, self._new = self._new, False
        return (self.fd, self.notes, self.fail, self.side) if new else (self.fd, self.notes, self.fail)

    def alive(self) -> bool:
        """Whether the directory still is the queue of that name."""
        try:
            found = os.stat(self.name, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return bool(self._descriptors) and (found.st_dev, found.st_ino) == self._identity

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncGenerator[None]:
        """Hold the queue's lock; nothing long is done meanwhile."""
        async with self._gate:
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, 0.01)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    # -- messages ----------------------------------------------------------------------------------------------------

    def move(self, old: str, new: str) -> bool:
        """Rename within the queue; False when somebody else was faster."""
        try:
            os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, directory: int | None = None) -> bytes | None:
        """A message's body; None when it is gone.

        Raises:
            OSError: what has the name is not a regular file (ELOOP, EISDIR, EINVAL), or cannot be read.
        """
        try:
            fd = os.open(name, _READ, dir_fd=self.fd if directory is None else directory)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise IsADirectoryError(f"{name} is not a regular file")
            return read_all(fd, found.st_size)
        finally:
            os.close(fd)

    def exists(self, name: str) -> bool:
        """Whether a name is in the queue."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    # -- notes -------------------------------------------------------------------------------------------------------

    def note(self, number: int) -> Note:
        """What is noted of a message; an empty note where nothing, or nothing readable, is."""
        try:
            data = self.read(str(number), self.notes)
            return _NOTHING if data is None else _decode(data)
        except (ValueError, IsADirectoryError):
            return _NOTHING

    def write_note(self, number: int, note: Note) -> int:
        """Note something; returns a descriptor to be synced and closed."""
        temporary = f".{secrets.token_hex(6)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self.notes)
        try:
            write_all(fd, msgspec.json.encode(note))
            os.rename(temporary, str(number), src_dir_fd=self.notes, dst_dir_fd=self.notes)
        except OSError:
            os.close(fd)
            os.unlink(temporary, dir_fd=self.notes)
            raise
        return fd

    def drop_note(self, number: int) -> None:
        """Forget what is noted of a message."""
        try:
            os.unlink(str(number), dir_fd=self.notes)
        except FileNotFoundError:
            pass

    async def origins(self) -> dict[str, str]:
        """The ids of messages that came from other stores, by their ids there; looked up once, whoever adds some adds them here."""
        if self._origins is None:
            names = [*await list_names(self.fd), *await list_names(self.fail)]
            there = {found[0] for name in names if (found := parse(name)) is not None}
            origins: dict[str, str] = {}
            for count, name in enumerate(await list_names(self.notes)):
                found = parse(name)
                if found is not None and found[0] in there and (origin := self.note(found[0]).origin) is not None:
                    origins[origin] = str(found[0])
                if count % _NOTES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._origins = origins
        return self._origins

    def forget_origins(self) -> None:
        """Look again next time."""
        self._origins = None

    # -- transitions that count; under the lock ----------------------------------------------------------------------

    def end_lease(self, number: int, expiry: int, target: str, change: Callable[[Note], Note]) -> int | None:
        """Note the end of a lease, and rename the message: both, or neither.

        Returns:
            The note's descriptor, to be synced and closed; None when the lease was lost.
        """
        old = leased_name(number, expiry)
        if not self.exists(old):
            return None
        before = self.note(number)
        fd = self.write_note(number, change(before))
        if self.move(old, target):
            return fd
        # Extended, ended or deleted in between: what was noted has not happened.
        os.close(self.write_note(number, before))
        os.close(fd)
        return None

    def requeue_expired(self, number: int, expiry: int) -> bool:
        """Make an expired lease, or a delay that is over, ready; False when somebody else was faster."""
        note = self.note(number)
        if expiry in {note.due, note.after}:
            return self.move(leased_name(number, expiry), str(number))
        fd = self.end_lease(
            number,
            expiry,
            str(number),
            lambda before: msgspec.structs.replace(
                before, tries=before.tries + 1, after=expiry, due=None, error="the lease expired"
            ),
        )
        if fd is None:
            return False
        os.close(fd)
        return True


def _made(name: str, parent: int) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    return os.open(name, _DIRECTORY, dir_fd=parent)
