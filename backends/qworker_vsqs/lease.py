"""Leasing and settling: one rename each, from a name that only its holder knows."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Sequence

import msgspec
import structlog

from qworker.message import Lease, Message, SettleAction, Settlement
from qworker_vsqs.names import Unit, leased_name
from qworker_vsqs.queue_dir import Folder, Note

__all__ = ["Consumer", "VsqsLease", "make_message"]

_log = structlog.get_logger("qworker.vsqs")


class VsqsLease(Lease, kw_only=True, eq=False):
    """A lease, and the name that it is held by."""

    number: int
    # In the queue's unit.
    expiry: int
    # True: it was ended, but the sync failed; a repetition makes it durable.
    unsure: bool = False


def make_message(folder: Folder, number: int, body: bytes, note: Note) -> Message:
    """The message of a file."""
    return Message(
        id=str(number),
        queue=folder.name,
        body=body,
        tries=note.tries,
        enqueued_at=Unit.enqueued_at(number) if note.enqueued_at is None else note.enqueued_at,
        original_id=note.origin,
    )


class Consumer:
    """Leases and settles for one backend instance.

    Args:
        unit: of the expiries.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        # No two leases of one process have the same expiry, nor, most likely, any two of different ones.
        self._sequence = itertools.count(secrets.randbelow(unit.spread))
        self._token = 0

    def expiry(self, at: float) -> int:
        """An expiry that no other lease has, not before Unix second `at`."""
        spread = self._unit.spread
        return (self._unit.ticks(at) // spread + 1) * spread + next(self._sequence) % spread

    def claim(self, folder: Folder, number: int, now: float, visibility: float) -> VsqsLease | None:
        """Lease one message; None when somebody else was faster, or it is no message."""
        expiry = self.expiry(now + visibility)
        name = leased_name(number, expiry)
        if not folder.move(str(number), name):
            return None
        try:
            body = folder.read(name)
        except OSError as error:
            if not _is_no_file(error):
                folder.move(name, str(number))
                raise
            self._set_aside(folder, number, name, now)
            return None
        if body is None:
            return None
        note = folder.note(number)
        self._token = max(self._token + 1, int(now * 1_000_000))
        return VsqsLease(
            message=make_message(folder, number, body, note),
            token=self._token,
            expires_at=self._unit.seconds(expiry),
            number=number,
            expiry=expiry,
        )

    def _set_aside(self, folder: Folder, number: int, name: str, now: float) -> None:
        """A link, a directory or a device with a message's name: kept, never opened."""
        _log.error("not_a_regular_file", queue=folder.name, id=str(number))
        os.close(folder.write_note(number, Note(error="not a regular file", failed_at=now)))
        os.rename(name, str(number), src_dir_fd=folder.fd, dst_dir_fd=folder.fail)

    def extend(self, folder: Folder, lease: VsqsLease, now: float, visibility: float) -> bool:
        """Extend one lease; False: it is lost."""
        expiry = self.expiry(now + visibility)
        if not folder.move(leased_name(lease.number, lease.expiry), leased_name(lease.number, expiry)):
            return False
        lease.expiry = expiry
        lease.expires_at = self._unit.seconds(expiry)
        return True

    async def settle(
        self, folder: Folder, settlements: Sequence[Settlement], now: float, files: list[int], done: list[VsqsLease]
    ) -> list[Settlement]:
        """End leases; the ones that were refused. Not durable before `files` and the queue's directories are synced.

        Args:
            folder: the queue.
            settlements: of this queue.
            now: Unix seconds.
            files: gets descriptors to be synced and closed.
            done: gets each lease that was ended, also when a later one raises.
        """
        refused: list[Settlement] = []
        counting: list[Settlement] = []
        for settlement in settlements:
            lease = settlement.lease
            if not isinstance(lease, VsqsLease):
                refused.append(settlement)
            elif lease.unsure:
                lease.unsure = False
                done.append(lease)
            elif settlement.action is SettleAction.ACK or (
                settlement.action is SettleAction.RELEASE and settlement.delay <= 0
            ):
                if self._end(folder, settlement, lease):
                    done.append(lease)
                else:
                    refused.append(settlement)
            else:
                counting.append(settlement)
        if counting:
            async with folder.locked():
                for settlement in counting:
                    fd = self._end_noted(folder, settlement, now)
                    if fd is None:
                        refused.append(settlement)
                    else:
                        files.append(fd)
                        assert isinstance(settlement.lease, VsqsLease)
                        done.append(settlement.lease)
        return refused

    def _end(self, folder: Folder, settlement: Settlement, lease: VsqsLease) -> bool:
        name = leased_name(lease.number, lease.expiry)
        if settlement.action is SettleAction.RELEASE:
            if not folder.move(name, str(lease.number)):
                return False
            folder.window.came(str(lease.number))
            return True
        try:
            os.unlink(name, dir_fd=folder.fd)
        except FileNotFoundError:
            return False
        folder.drop_note(lease.number)
        return True

    def _end_noted(self, folder: Folder, settlement: Settlement, now: float) -> int | None:
        lease = settlement.lease
        assert isinstance(lease, VsqsLease)
        number, expiry = lease.number, lease.expiry
        error = None if settlement.error is None else settlement.error.encode(errors="replace").decode()
        replace = msgspec.structs.replace
        if settlement.action is SettleAction.FAIL_PERM:
            return fail(folder, number, expiry, error, now)
        due = self._unit.ticks(now + settlement.delay) if settlement.delay > 0 else None
        target = str(number) if due is None else leased_name(number, due)
        if settlement.action is SettleAction.FAIL_TMP:
            fd = folder.end_lease(
                number,
                expiry,
                target,
                lambda note: replace(note, tries=note.tries + 1, after=expiry, due=due, error=error),
            )
        else:
            fd = folder.end_lease(number, expiry, target, lambda note: replace(note, due=due))
        if fd is not None:
            folder.window.came(target)
        return fd


def fail(folder: Folder, number: int, expiry: int, error: str | None, now: float) -> int | None:
    """Keep a leased message in fail/, its reason first; the note's descriptor, None when the lease is lost."""
    name = leased_name(number, expiry)
    if not folder.exists(name):
        return None
    before = folder.note(number)
    fd = folder.write_note(number, msgspec.structs.replace(before, error=error, failed_at=now, due=None))
    try:
        os.rename(name, str(number), src_dir_fd=folder.fd, dst_dir_fd=folder.fail)
    except FileNotFoundError:
        os.close(folder.write_note(number, before))
        os.close(fd)
        return None
    return fd


def _is_no_file(error: OSError) -> bool:
    return isinstance(error, IsADirectoryError) or error.errno in {errno.ELOOP, errno.ENXIO}
