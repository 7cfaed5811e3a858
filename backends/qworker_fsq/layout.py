"""The directories of an fsq queue, or of one host's sub-queue: opened once, used through descriptors, installed whole.

<root>/<queue>/{tmp,queue,done,fail}/ [down] [trigger-s]
<root>/<queue>/hosts/<host>/{tmp,queue,done,fail}/ [down]       hosts-trigger-s beside hosts/
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat

import msgspec

from qworker.errors import BackendError, QueueNotFound
from qworker.kit.files import CREATE, DIRECTORY, change_mode, make_fifo
from qworker_fsq.environment import Constants, group_id, user_id

__all__ = ["Install", "QueueDir", "QueueExists", "install", "install_host", "is_queue", "open_queue", "uninstall"]

_PART = DIRECTORY | os.O_NOFOLLOW
_PULL = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_LISTEN = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class QueueExists(BackendError):
    """A queue that was to be installed is there."""


class QueueDir:
    """The open directories of one queue or sub-queue.

    Args:
        name: the queue's.
        host: whose sub-queue this is; None: the queue itself.
        constants: what its parts are called.
        base: a descriptor, from now on this object's.
    """

    __slots__ = ("base", "constants", "done", "fail", "host", "name", "queue", "tmp")

    def __init__(self, name: str, host: str | None, constants: Constants, base: int) -> None:
        self.name = name
        self.host = host
        self.constants = constants
        self.base = base
        self.tmp = self.queue = self.done = self.fail = -1

    @property
    def exists(self) -> bool:
        """False once it was removed."""
        return os.fstat(self.base).st_nlink > 0

    @property
    def is_down(self) -> bool:
        """Whether nobody may take items."""
        return _is_there(self.constants.down, self.base) or (self.host is not None and self.is_down_with_queue)

    @property
    def is_down_with_queue(self) -> bool:
        """Whether the queue itself is down: all of its sub-queues are, then."""
        down = self.constants.down
        return _is_there(down if self.host is None else f"../../{down}", self.base)

    def down(self) -> None:
        """Let nobody take items: idempotent, but for the owner and mode."""
        constants = self.constants
        try:
            fd = os.open(constants.down, CREATE, constants.item_mode, dir_fd=self.base)
        except FileExistsError:
            fd = os.open(constants.down, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.base)
        try:
            os.fchmod(fd, constants.item_mode)
            own(fd, constants.item_user, constants.item_group)
        finally:
            os.close(fd)

    def up(self) -> None:
        """Let items be taken. Idempotent."""
        try:
            os.unlink(self.constants.down, dir_fd=self.base)
        except FileNotFoundError:
            # Up already.
            return

    def pull_trigger(self, trigger: str | None = None) -> bool:
        """Write one byte to the trigger; False where nobody listens, or there is none."""
        try:
            fd = os.open(self.constants.trigger if trigger is None else trigger, _PULL, dir_fd=self.base)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENXIO, errno.ELOOP, errno.EACCES}:
                return False
            raise
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                return False
            os.write(fd, b"\0")
        except BlockingIOError:
            # Full of pulls that nobody has read: another one says nothing new.
            return True
        finally:
            os.close(fd)
        return True

    def open_trigger(self) -> int:
        """The trigger to listen on; -1 where there is none."""
        if self.host is not None:
            return -1
        try:
            fd = os.open(self.constants.trigger, _LISTEN, dir_fd=self.base)
        except OSError:
            # It is optional: inotify and rescans do without.
            return -1
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return -1

    def host_names(self) -> list[str]:
        """The hosts that have sub-queues, sorted; none in a queue without any."""
        try:
            directory = os.open(self.constants.hosts, _PART, dir_fd=self.base)
        except FileNotFoundError:
            return []
        try:
            return sorted(name for name in os.listdir(directory) if name[0] != ".")
        finally:
            os.close(directory)

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for part in ("tmp", "queue", "done", "fail", "base"):
            fd: int = getattr(self, part)
            if fd >= 0:
                setattr(self, part, -1)
                os.close(fd)


def own(fd: int, user: str | None, group: str | None) -> None:
    """Give a file to whom it should belong.

    Raises:
        OSError: this user may not.
    """
    if user is not None or group is not None:
        os.fchown(fd, user_id(user), group_id(group))


def _is_there(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


# -- opening ---------------------------------------------------------------------------------------------------------


def place(name: str, host: str | None, constants: Constants) -> str:
    """Where a queue or a sub-queue is, under the root."""
    return name if host is None else f"{name}/{constants.hosts}/{host}"


def is_queue(root: int, name: str, host: str | None, constants: Constants) -> bool:
    """Whether there is a queue; a link to one is none."""
    base = place(name, host, constants)
    try:
        found = [os.stat(path, dir_fd=root, follow_symlinks=False) for path in (base, f"{base}/{constants.queue}")]
    except (FileNotFoundError, NotADirectoryError):
        return False
    return all(stat.S_ISDIR(one.st_mode) for one in found)


def open_queue(root: int, name: str, constants: Constants, host: str | None = None) -> QueueDir | None:
    """Open a queue or a sub-queue; None when there is none.

    Raises:
        OSError: it cannot be opened.
    """
    if not is_queue(root, name, host, constants):
        return None
    try:
        opened = QueueDir(name, host, constants, os.open(place(name, host, constants), _PART, dir_fd=root))
    except FileNotFoundError:
        return None
    try:
        for part in ("tmp", "queue", "done", "fail"):
            setattr(opened, part, os.open(getattr(constants, part), _PART, dir_fd=opened.base))
    except FileNotFoundError:
        opened.close()
        # Removed while it was being opened; or a part is missing, and then it is no queue of the standard.
        return None
    except BaseException:
        opened.close()
        raise
    return opened


# -- installing ------------------------------------------------------------------------------------------------------


class Install(msgspec.Struct, frozen=True, kw_only=True):
    """How a queue is installed."""

    down: bool = False
    triggered: bool = False
    hosts: tuple[str, ...] = ()


def install(root: int, name: str, constants: Constants, how: Install | None = None, *, durable: bool = True) -> None:
    """Make a queue under a hidden name, then show it whole.

    Raises:
        QueueExists: it is there.
        OSError: it cannot be made.
    """
    how = Install() if how is None else how
    _install(root, name, constants, down=how.down, triggered=how.triggered or constants.use_trigger, durable=durable)
    if how.hosts:
        install_host(root, name, constants, how.hosts, down=how.down)
        if how.triggered:
            base = os.open(name, _PART, dir_fd=root)
            try:
                # With the queue's owner and mode, which is what others give it.
                owner = (constants.queue_user, constants.queue_group)
                _make_trigger(base, constants.hosts_trigger, constants.queue_mode, owner)
            finally:
                os.close(base)


def install_host(root: int, name: str, constants: Constants, hosts: tuple[str, ...], *, down: bool = False) -> None:
    """Make sub-queues for hosts.

    Raises:
        QueueExists: one is there; those before it are made.
        QueueNotFound: there is no such queue.
        OSError: one cannot be made.
    """
    base = _base(root, name)
    try:
        try:
            _make_directory(constants.hosts, constants, base)
        except FileExistsError:
            pass
        parent = os.open(constants.hosts, _PART, dir_fd=base)
    finally:
        os.close(base)
    try:
        for host in hosts:
            _install(parent, host, constants, down=down, triggered=False, durable=True)
    finally:
        os.close(parent)


def uninstall(root: int, name: str, constants: Constants, host: str | None = None) -> None:
    """Take a queue or a sub-queue down, hide it, and remove it with all that is in it.

    Raises:
        QueueNotFound: there is none.
        OSError: it cannot be removed.
    """
    opened = open_queue(root, name, constants, host)
    if opened is None:
        raise QueueNotFound(name if host is None else f"{name}/{constants.hosts}/{host}")
    try:
        opened.down()
    finally:
        opened.close()
    where = place(name, host, constants)
    parent, _, last = where.rpartition("/")
    hidden = f"{parent}/.{last}{secrets.token_hex(4)}" if parent else f".{last}{secrets.token_hex(4)}"
    os.rename(where, hidden, src_dir_fd=root, dst_dir_fd=root)
    shutil.rmtree(hidden, dir_fd=root)


def _base(root: int, name: str) -> int:
    try:
        return os.open(name, _PART, dir_fd=root)
    except FileNotFoundError:
        raise QueueNotFound(name) from None


def _install(parent: int, name: str, constants: Constants, *, down: bool, triggered: bool, durable: bool) -> None:
    hidden = f".{name}{secrets.token_hex(4)}"
    _make_directory(hidden, constants, parent)
    try:
        made = QueueDir(name, None, constants, os.open(hidden, _PART, dir_fd=parent))
        try:
            for part in (constants.tmp, constants.queue, constants.done, constants.fail):
                _make_directory(part, constants, made.base)
            if down:
                made.down()
            if triggered:
                owner = (constants.item_user, constants.item_group)
                _make_trigger(made.base, constants.trigger, constants.item_mode, owner)
            if durable:
                os.fsync(made.base)
        finally:
            made.close()
        os.rename(hidden, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError as error:
        if not _is_there(hidden, parent):
            # The rename has happened, and only its reply was lost.
            return
        shutil.rmtree(hidden, dir_fd=parent)
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise QueueExists(f"queue exists: {name}") from error
        raise
    if durable:
        os.fsync(parent)


def _make_directory(name: str, constants: Constants, parent: int) -> None:
    os.mkdir(name, constants.queue_mode & 0o777, dir_fd=parent)
    fd = os.open(name, _PART, dir_fd=parent)
    try:
        own(fd, constants.queue_user, constants.queue_group)
        # After the owner, whose change may clear the set-group-id bit; and whatever the umask says.
        change_mode(fd, constants.queue_mode)
    finally:
        os.close(fd)


def _make_trigger(base: int, name: str, mode: int, owner: tuple[str | None, str | None]) -> None:
    try:
        make_fifo(name, mode & 0o777, base)
    except FileExistsError:
        return
    if owner != (None, None):
        os.chown(name, user_id(owner[0]), group_id(owner[1]), dir_fd=base, follow_symlinks=False)
    os.chmod(name, mode, dir_fd=base)
