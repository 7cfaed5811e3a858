"""The directories of an fsq queue, or of one host's sub-queue.

They are opened once, and installed completely or not at all.

<root>/<queue>/{tmp,queue,done,fail}/ [down] [trigger-s]
<root>/<queue>/hosts/<host>/{tmp,queue,done,fail}/ [down]       hosts-trigger-s next to hosts/
"""

from __future__ import annotations

import errno
import os
import secrets
import stat

import msgspec

from qworker.errors import BackendError, QueueNotFound
from qworker.kit.directory.queue_files import QueueFiles, is_queue
from qworker.kit.files import change_mode, has_entry, make_fifo, remove_whole_tree, try_unlink
from qworker.kit.opening import create_file, open_directory, open_entry, open_own
from qworker.kit.store_errors import NOT_A_FILE, NOT_EMPTY
from qworker.names import check_existing_queue
from qworker_fsq.environment import Constants, group_id, user_id

__all__ = [
    "Install",
    "QueueDir",
    "QueueExists",
    "add_missing_parts",
    "has_queue",
    "install",
    "install_host",
    "open_queue",
    "queue_path",
    "require_queue",
    "set_owner",
    "uninstall",
]

_NO_LISTENER = NOT_A_FILE | {errno.ENOENT, errno.EACCES}


class QueueExists(BackendError):
    """A queue that was to be installed exists already."""


class QueueDir(QueueFiles):
    """The open directories of one queue or sub-queue.

    Args:
        name: The queue's name.
        host: The host of the sub-queue; None: the queue itself.
        constants: The names of its parts.
        base: A descriptor of its directory, which this object owns from now on.
    """

    __slots__ = ("constants", "host")

    def __init__(self, name: str, host: str | None, constants: Constants, base: int) -> None:
        super().__init__(name, base)
        self.host = host
        self.constants = constants

    @property
    def path(self) -> str:
        """The queue's path under the root."""
        return queue_path(self.name, self.host, self.constants)

    @property
    def directories(self) -> dict[str, int]:
        """The descriptors of its directories, by their names."""
        constants = self.constants
        return {
            constants.tmp: self.tmp,
            constants.queue: self.queue,
            constants.done: self.done,
            constants.fail: self.fail,
        }

    @property
    def is_down(self) -> bool:
        """Whether workers must not take items."""
        return has_entry(self.constants.down, self.base) or (self.host is not None and self.is_down_with_queue)

    @property
    def is_down_with_queue(self) -> bool:
        """True if the queue itself is down, which also pauses all of its sub-queues."""
        down = self.constants.down
        return has_entry(down if self.host is None else f"../../{down}", self.base)

    def down(self) -> None:
        """Pause it. Idempotent, except for the owner and mode of the file."""
        constants = self.constants
        try:
            fd = create_file(constants.down, self.base, constants.item_mode)
        except FileExistsError:
            fd = open_own(constants.down, self.base, os.O_WRONLY)
        try:
            os.fchmod(fd, constants.item_mode)
            set_owner(fd, constants.item_user, constants.item_group)
        finally:
            os.close(fd)

    def up(self) -> None:
        """Resume it. Idempotent."""
        try_unlink(self.constants.down, self.base)

    def pull_trigger(self, trigger: str | None = None) -> bool:
        """Write one byte to the trigger. Return False if no process listens, or there is no trigger."""
        try:
            fd = open_entry(self.constants.trigger if trigger is None else trigger, os.O_WRONLY, self.base)
        except OSError as error:
            if error.errno in _NO_LISTENER:
                return False
            raise
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                return False
            os.write(fd, b"\0")
        except BlockingIOError:
            # The FIFO is full of pulls that were not read. Another pull adds nothing.
            return True
        finally:
            os.close(fd)
        return True

    def open_trigger(self) -> int:
        """Open the trigger to listen on; -1 if there is none."""
        if self.host is not None:
            return -1
        try:
            fd = open_entry(self.constants.trigger, os.O_RDWR, self.base)
        except OSError:
            # The trigger is optional: inotify and rescans work without it.
            return -1
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return -1

    def host_names(self) -> list[str]:
        """Return the hosts that have sub-queues, sorted."""
        try:
            directory = open_directory(self.constants.hosts, self.base)
        except FileNotFoundError:
            return []
        try:
            return sorted(name for name in os.listdir(directory) if name[0] != ".")
        finally:
            os.close(directory)


def set_owner(fd: int, user: str | None, group: str | None) -> None:
    """Set the owner of a file.

    Raises:
        OSError: This user is not allowed to.
    """
    if user is not None or group is not None:
        os.fchown(fd, user_id(user), group_id(group))


# -- opening ---------------------------------------------------------------------------------------------------------


def queue_path(name: str, host: str | None, constants: Constants) -> str:
    """Return where a queue or a sub-queue is, under the root."""
    return name if host is None else f"{name}/{constants.hosts}/{host}"


def has_queue(root: int, name: str, host: str | None, constants: Constants) -> bool:
    """Return whether a queue exists. A link to one is not a queue."""
    return is_queue(root, queue_path(name, host, constants), constants.queue)


def open_queue(root: int, name: str, constants: Constants, host: str | None = None) -> QueueDir | None:
    """Open a queue or a sub-queue, or return None if it does not exist.

    Raises:
        OSError: It cannot be opened.
    """
    if not has_queue(root, name, host, constants):
        return None
    try:
        opened = QueueDir(name, host, constants, open_directory(queue_path(name, host, constants), root))
    except FileNotFoundError:
        return None
    try:
        for part in ("tmp", "queue", "done", "fail"):
            setattr(opened, part, open_directory(getattr(constants, part), opened.base))
    except FileNotFoundError:
        opened.close()
        # It was removed while it was being opened, or a part is missing, so that it is not a queue of the standard.
        return None
    except BaseException:
        opened.close()
        raise
    return opened


def require_queue(root: int, name: str, constants: Constants, host: str | None = None) -> QueueDir:
    """Open a queue or a sub-queue.

    Raises:
        InvalidName: The name is not valid.
        QueueNotFound: It does not exist.
        OSError: It cannot be opened.
    """
    opened = open_queue(root, check_existing_queue(name), constants, host)
    if opened is None:
        raise QueueNotFound(name if host is None else f"{name}/{constants.hosts}/{host}")
    return opened


# -- installing ------------------------------------------------------------------------------------------------------


class Install(msgspec.Struct, frozen=True, kw_only=True):
    """The options of an installation."""

    down: bool = False
    triggered: bool = False
    hosts: tuple[str, ...] = ()


def install(root: int, name: str, constants: Constants, how: Install | None = None, *, durable: bool = True) -> None:
    """Create a queue under a hidden name, then rename it.

    Raises:
        QueueExists: It exists.
        OSError: It cannot be created.
    """
    how = Install() if how is None else how
    _install(root, name, constants, down=how.down, triggered=how.triggered or constants.use_trigger, durable=durable)
    if how.hosts:
        install_host(root, name, constants, how.hosts, down=how.down)
        if how.triggered:
            base = open_directory(name, root)
            try:
                # The trigger has the queue's owner and mode, as other programs set it.
                owner = (constants.queue_user, constants.queue_group)
                _make_trigger(base, constants.hosts_trigger, constants.queue_mode, owner)
            finally:
                os.close(base)


def install_host(root: int, name: str, constants: Constants, hosts: tuple[str, ...], *, down: bool = False) -> None:
    """Create sub-queues for hosts.

    Raises:
        QueueExists: One exists. Those before it are created.
        QueueNotFound: The queue does not exist.
        OSError: One cannot be created.
    """
    base = _base(root, name)
    try:
        try:
            _make_directory(constants.hosts, constants, base)
        except FileExistsError:
            pass
        parent = open_directory(constants.hosts, base)
    finally:
        os.close(base)
    try:
        for host in hosts:
            _install(parent, host, constants, down=down, triggered=False, durable=True)
    finally:
        os.close(parent)


def add_missing_parts(root: int, name: str, constants: Constants) -> bool:
    """Create the directories of a queue that were removed. Return whether there were any.

    A directory without any of them is not a queue.
    """
    base = _base(root, name)
    try:
        parts = (constants.tmp, constants.queue, constants.done, constants.fail)
        missing = [part for part in parts if not has_entry(part, base)]
        if len(missing) == len(parts):
            return False
        for part in missing:
            try:
                _make_directory(part, constants, base)
            except FileExistsError:
                # Another process was faster.
                continue
        return bool(missing)
    finally:
        os.close(base)


def uninstall(root: int, name: str, constants: Constants, host: str | None = None) -> None:
    """Pause a queue or a sub-queue, hide it, and remove it with all of its items.

    Raises:
        QueueNotFound: It does not exist.
        OSError: It cannot be removed.
    """
    opened = require_queue(root, name, constants, host)
    try:
        opened.down()
    finally:
        opened.close()
    where = queue_path(name, host, constants)
    parent, _, last = where.rpartition("/")
    hidden = f"{parent}/.{last}{secrets.token_hex(4)}" if parent else f".{last}{secrets.token_hex(4)}"
    os.rename(where, hidden, src_dir_fd=root, dst_dir_fd=root)
    remove_whole_tree(hidden, root)


def _base(root: int, name: str) -> int:
    try:
        return open_directory(name, root)
    except FileNotFoundError:
        raise QueueNotFound(name) from None


def _install(parent: int, name: str, constants: Constants, *, down: bool, triggered: bool, durable: bool) -> None:
    hidden = f".{name}{secrets.token_hex(4)}"
    _make_directory(hidden, constants, parent)
    try:
        made = QueueDir(name, None, constants, open_directory(hidden, parent))
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
        if not has_entry(hidden, parent):
            # The rename has happened, and only its reply was lost.
            return
        remove_whole_tree(hidden, parent)
        if error.errno in NOT_EMPTY or error.errno == errno.ENOTDIR:
            raise QueueExists(f"queue exists: {name}") from error
        raise
    if durable:
        os.fsync(parent)


def _make_directory(name: str, constants: Constants, parent: int) -> None:
    os.mkdir(name, constants.queue_mode & 0o777, dir_fd=parent)
    fd = open_directory(name, parent)
    try:
        set_owner(fd, constants.queue_user, constants.queue_group)
        # The mode is set after the owner, because a change of the owner may clear the set-group-id bit. It does not
        # depend on the umask.
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
