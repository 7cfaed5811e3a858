"""The data that mq cannot store, in `.qworker/lease/<queue>:<id>`: tries, and the lease with its token and expiry.

A state is written in place by one call, always at the same length, and only under the message's lock (see
`message_lock`), so that no reader sees half of one. A full store accepts no new state. It is then kept in this process,
which can still empty the queue. To other processes such a lease looks like that of a foreign server.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from qworker.failure_text import summary
from qworker.kit.body_slices import OwnDescriptor
from qworker.kit.files import try_unlink
from qworker.kit.opening import open_entry, open_own
from qworker.kit.store_errors import FULL
from qworker.message import Lease

__all__ = ["LeaseState", "LeaseStates", "MqLease", "change_time_token"]

_LENGTH = 2048


class MqLease(Lease, kw_only=True, eq=False):
    """A lease on `mq:`."""

    # The change time (ns) that the file got when it was leased.
    moved: int = 0
    # Whether the lease has a stored state. See `MqOptions.delay`.
    has_state: bool = True
    # The file of a large body, until the body is read.
    unread: OwnDescriptor | None = None


class LeaseState(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The tries and the lease of one message."""

    tries: int = 0
    # Rises with each delivery.
    token: int = 0
    # Seconds that the lease lasts. 0: there is no lease.
    visibility: float = 0.0
    # Unix seconds.
    expires_at: float = 0.0
    # The liveness file of the holder (see `holder`). Empty: the lease ends by time alone.
    holder: str = ""
    # The change time (ns) of the file after the rename that leased it. If the file has a later one, another process has
    # moved it since, and the lease is over.
    moved: int = 0
    error: str = ""
    # The message's id in the store that it came from.
    origin: str = ""

    def without_lease(self, *, tries: int | None = None, error: str | None = None) -> LeaseState:
        """Return this state after the lease has ended."""
        return LeaseState(
            tries=self.tries if tries is None else tries,
            token=self.token,
            # The length of a state is bounded, and so is the text. The full error of a failure has its own file.
            error=self.error if error is None else summary(error)[:200],
            origin=self.origin,
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(LeaseState).decode
_EMPTY = LeaseState()


class LeaseStates:
    """The lease states of a root.

    Args:
        directory: Descriptor of `.qworker/lease`.
        delay: Seconds that a lease without a state lasts. See `MqOptions.delay`.
    """

    def __init__(self, directory: int, delay: float) -> None:
        self._directory = directory
        self._delay = delay
        found = os.fstat(directory)
        # If others can create names in the directory, each file is checked before it is written.
        self._is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
        self._unwritten: dict[str, LeaseState] = {}
        # The leases without a state that this process took, and whose end it has not seen.
        self._stateless: set[str] = set()

    def read(self, name: str) -> LeaseState:
        """Return the state of `<queue>:<id>`. If there is none, or it is damaged, return the empty one."""
        if self._unwritten and name in self._unwritten:
            return self._unwritten[name]
        try:
            fd = open_entry(name, os.O_RDONLY, self._directory)
        except FileNotFoundError:
            return _EMPTY
        try:
            return _decode(os.read(fd, _LENGTH))
        except ValueError:
            return _EMPTY
        finally:
            os.close(fd)

    def read_valid(self, name: str, fd: int, token: int) -> LeaseState | None:
        """Return the state of a leased message if the lease with this token is still valid.

        Args:
            name: The message, as `<queue>:<id>`.
            fd: Descriptor of its file, which this process has locked.
            token: The fencing token.
        """
        state = self.read(name)
        moved = os.fstat(fd).st_ctime_ns
        if not state.token and token == change_time_token(moved):
            # A lease without a state: see `MqOptions.delay`.
            expires_at = moved / 1e9 + self._delay
            return LeaseState(
                tries=state.tries, token=token, visibility=self._delay, expires_at=expires_at, moved=moved
            )
        if state.token != token or not state.visibility or state.moved != moved:
            return None
        return state

    def write(self, name: str, state: LeaseState) -> None:
        """Store a state. If the store is full, keep it in this process."""
        self._stateless.discard(name)
        try:
            fd = self._open(name, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(fd, _encode(state).ljust(_LENGTH), 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._unwritten[name] = state
        else:
            if self._unwritten:
                self._unwritten.pop(name, None)

    def _open(self, name: str, flags: int) -> int:
        return (open_entry if self._is_private else open_own)(name, flags, self._directory)

    def note_stateless(self, name: str) -> None:
        """Note that this process took a lease that has no state."""
        self._stateless.add(name)

    def has_returned(self, name: str, state: LeaseState) -> bool:
        """Return whether another program ended the last lease of a message that is ready.

        A lease of this process that has no state is known to this process only.
        """
        return bool(state.visibility) or name in self._stateless

    def forget_stateless(self, is_stored: Callable[[str], bool]) -> None:
        """Forget leases whose messages are gone: other programs delete only the message."""
        self._stateless = {name for name in tuple(self._stateless) if is_stored(name)}

    def delete(self, name: str) -> None:
        """Delete the state of a message, if there is one."""
        self._stateless.discard(name)
        if self._unwritten:
            self._unwritten.pop(name, None)
        try_unlink(name, self._directory)


def change_time_token(moved: int) -> int:
    """Return the token of a lease without a state: microseconds, which JSON's numbers hold in every language."""
    return moved // 1000
