"""Ending leases in batches: each end is a rename or an unlink on the loop, and one commit makes all of them durable."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from qworker.kit.files import close_all
from qworker.kit.settle import Unstored
from qworker.message import Settlement
from qworker_file.lease import FileLease
from qworker_file.lease_end import end_lease
from qworker_file.store import Store

__all__ = ["settle_all"]

_TURN = 0.002


async def settle_all(store: Store, settlements: Sequence[Settlement]) -> list[Settlement]:
    """End leases of any queues and return the refused settlements.

    Raises:
        SettledInPart: The others are stored.
        OSError: Some have ended. A repetition of the same settlements completes it.
    """
    refused: list[Settlement] = []
    changed: set[int] = set()
    reasons: list[int] = []
    unstored = Unstored()
    used = {settlement.lease.files for settlement in settlements if isinstance(settlement.lease, FileLease)}
    for files in used:
        files.users += 1
    try:
        # One batch runs after another: if two batches end the same leases, one of them ends all of these.
        async with store.settling:
            await _settle(store, settlements, refused, changed, reasons, unstored)
        # A queue that was closed since an earlier attempt has no descriptors.
        await store.commit({directory for directory in changed if directory >= 0}, reasons)
    finally:
        for files in used:
            files.users -= 1
        for fd in reasons:
            os.close(fd)
    unstored.raise_error(settlements, refused)
    return refused


async def _settle(
    store: Store,
    settlements: Sequence[Settlement],
    refused: list[Settlement],
    changed: set[int],
    reasons: list[int],
    unstored: Unstored,
) -> None:
    keep_done = store.options.keep_done.keep
    now = store.clock.time()
    turn_ends = time.perf_counter() + _TURN
    finished: list[int] = []
    try:
        for settlement in settlements:
            lease = settlement.lease
            assert isinstance(lease, FileLease)
            if unstored.has_enough:
                unstored.add(settlement)
                continue
            try:
                directories = end_lease(settlement, lease, now, finished, keep_done=keep_done)
            except OSError as error:
                unstored.add(settlement, error)
                if lease.reason_fd >= 0:
                    os.close(lease.reason_fd)
                    lease.reason_fd = -1
                continue
            if directories is None:
                refused.append(settlement)
            else:
                changed |= directories
                if lease.reason_fd >= 0:
                    reasons.append(lease.reason_fd)
                    lease.reason_fd = -1
            store.on_lease_end(settlement)
            if time.perf_counter() > turn_ends:
                close_all(finished)
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN
    finally:
        close_all(finished)
