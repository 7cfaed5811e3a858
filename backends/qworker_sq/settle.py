"""Ending leases of a channel."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.kit.settle import Unstored
from qworker.kit.store_errors import store_errors
from qworker.message import SettleAction, Settlement
from qworker_sq.channel import Channel
from qworker_sq.lease import SqLease, is_held
from qworker_sq.ledger import RowKind

__all__ = ["settle_in_channel"]


async def settle_in_channel(channel: Channel, settlements: Sequence[Settlement]) -> list[Settlement]:
    """End leases of one channel and return the refused settlements."""
    # (place, token) of each lease that was ended, also when a later one raises.
    ended: list[tuple[int, int]] = []
    unstored = Unstored()
    wake = any(settlement.action in {SettleAction.RELEASE, SettleAction.FAIL_TMP} for settlement in settlements)
    try:
        with store_errors(f"settle messages of {channel.topic.name}"):
            async with channel.section():
                refused = _end_leases(channel, settlements, channel.topic.clock.time(), ended, unstored)
        if ended:
            await channel.commit(wake=wake)
        with store_errors(f"settle messages of {channel.topic.name}"):
            unstored.raise_error(settlements, refused)
    except BaseException:
        # They are ended, but perhaps not durably: a repetition succeeds, and makes it durable.
        channel.unsynced.update(ended)
        raise
    return refused


def _end_leases(
    channel: Channel,
    settlements: Sequence[Settlement],
    now: float,
    ended: list[tuple[int, int]],
    unstored: Unstored,
) -> list[Settlement]:
    """End leases, in a section. They are durable after the channel's next commit."""
    refused: list[Settlement] = []
    acked: dict[int, int] = {}
    for settlement in settlements:
        lease = settlement.lease
        if isinstance(lease, SqLease) and (lease.place, lease.token) in channel.unsynced:
            channel.unsynced.discard((lease.place, lease.token))
            ended.append((lease.place, lease.token))
        elif not isinstance(lease, SqLease) or lease.place in acked or not is_held(channel, lease):
            refused.append(settlement)
        elif settlement.action is SettleAction.ACK:
            acked[lease.place] = lease.token
        else:
            try:
                _end_lease(channel, settlement, lease.place, now)
            except OSError as error:
                unstored.add(settlement, error)
                continue
            ended.append((lease.place, lease.token))
    if acked:
        kept = [place for place in acked if channel.ledger.open[place].kept]
        channel.append([[RowKind.ACK, list(acked)]])
        channel.drop_bodies(kept)
        ended += acked.items()
    return refused


def _end_lease(channel: Channel, settlement: Settlement, place: int, now: float) -> None:
    due = now + settlement.delay if settlement.delay > 0 else 0.0
    error = None if settlement.error is None else settlement.error.encode(errors="replace").decode()
    if settlement.action is SettleAction.FAIL_PERM:
        # A server keeps no bodies in its leases.
        channel.keep_body(place, settlement.lease.message.body or channel.read_body(place) or b"")
        channel.append([[RowKind.FAIL, place, now, channel.ledger.open[place].tries, error, 0]])
    elif settlement.action is SettleAction.FAIL_TMP:
        channel.append([[RowKind.RETRY, place, due, error]])
    else:
        channel.append([[RowKind.RELEASE, place, due]])
