"""Ending leases in batches: each end is a rename on the loop, and one commit makes all of them durable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from qworker.kit.settle import Unstored
from qworker.message import SettleAction, Settlement
from qworker_fsq.lease import FsqLease
from qworker_fsq.lease_end import end_lease
from qworker_fsq.store import Store

__all__ = ["settle_all"]

_TURN = 0.002


async def settle_all(store: Store, settlements: Sequence[Settlement]) -> list[Settlement]:
    """End leases of any queues and return the refused settlements.

    Raises:
        SettledInPart: The others are stored.
        OSError: Some have ended. A repetition of the same settlements completes it.
    """
    used = {settlement.lease.claimed.files for settlement in settlements if isinstance(settlement.lease, FsqLease)}
    for files in used:
        files.users += 1
    try:
        return await _settle(store, settlements)
    finally:
        for files in used:
            files.users -= 1


async def _settle(store: Store, settlements: Sequence[Settlement]) -> list[Settlement]:
    refused: list[Settlement] = []
    changed: set[int] = set()
    unstored = Unstored()
    # One batch runs after another: if two batches end the same leases, one of them ends all of these.
    async with store.settling:
        turn_ends = time.perf_counter() + _TURN
        now = store.clock.time()
        for settlement in settlements:
            if unstored.has_enough:
                unstored.add(settlement)
                continue
            try:
                directories = _settle_one(store, settlement, now)
            except OSError as error:
                unstored.add(settlement, error)
                continue
            if directories is None:
                refused.append(settlement)
            else:
                changed |= directories
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN
    # A queue that was closed since an earlier attempt has no descriptors.
    await store.commit({directory for directory in changed if directory >= 0})
    unstored.raise_error(settlements, refused)
    return refused


def _settle_one(store: Store, settlement: Settlement, now: float) -> frozenset[int] | None:
    lease = settlement.lease
    assert isinstance(lease, FsqLease)
    claimed, before = lease.claimed, lease.ended
    name = claimed.name
    queue = store.get_open(lease.message.queue)
    if queue is None or queue.files is not claimed.files:
        # The queue was deleted.
        claimed.close()
        return None
    try:
        directories = end_lease(settlement, lease, now, store.limits)
    except OSError as error:
        queue.on_unsettled(lease, error)
        raise
    if before is None:
        stays = directories is not None and settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}
        due = now + settlement.delay if settlement.delay > 0 else None
        queue.on_lease_end(lease, name, stays=stays, due=due)
        if directories is not None:
            queue.on_settled(name)
        store.on_room()
        if stays:
            store.notify(queue)
    return directories
