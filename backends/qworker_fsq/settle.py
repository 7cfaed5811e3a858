"""Ending leases in batches: every one is a rename on the loop, and one commit carries them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from qworker.message import SettleAction, Settlement
from qworker_fsq.lease_end import FsqLease, settle
from qworker_fsq.store import Store

__all__ = ["settle_all"]

_TURN = 0.002


async def settle_all(store: Store, settlements: Sequence[Settlement]) -> list[Settlement]:
    """End leases of any queues; the settlements that were refused.

    Raises:
        OSError: some have ended; a repetition of the same settlements completes it.
    """
    refused: list[Settlement] = []
    changed: set[int] = set()
    # One batch after another: of two that end the same leases, one ends them all.
    async with store.settling:
        turn_ends = time.perf_counter() + _TURN
        now = store.clock.time()
        for settlement in settlements:
            directories = _settle_one(store, settlement, now)
            if directories is None:
                refused.append(settlement)
            else:
                changed |= directories
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN
    await store.commit(changed)
    return refused


def _settle_one(store: Store, settlement: Settlement, now: float) -> frozenset[int] | None:
    lease = settlement.lease
    assert isinstance(lease, FsqLease)
    claimed, before = lease.claimed, lease.ended
    name = claimed.name
    local = store.known(lease.message.queue)
    if local is None or local.files is not claimed.files:
        # The queue was deleted.
        claimed.close()
        return None
    directories = settle(settlement, lease, now, store.limits)
    if before is None:
        stays = directories is not None and settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP}
        due = now + settlement.delay if settlement.delay > 0 else None
        local.ended(lease, name, stays=stays, due=due)
        store.make_room()
        if stays:
            store.notify(local)
    return directories
