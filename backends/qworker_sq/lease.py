"""What a worker does with a channel: lease, extend, settle, reap. Each function runs in a section of the channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from qworker.kit.segments.log import Damaged
from qworker.message import Lease, Message, SettleAction, Settlement, State
from qworker_sq.channel import Channel
from qworker_sq.ledger import Row
from qworker_sq.record_info import Note
from qworker_sq.topic import position_id

__all__ = ["SqLease", "claim", "expire", "extend", "holds", "make_message", "set_damage_aside", "settle"]

_log = structlog.get_logger("qworker.sq")
_DAMAGED = "a damaged record: its length or checksum does not fit; what stands in the log is kept as the body"


class SqLease(Lease, kw_only=True, eq=False):
    """A lease, and the place of its record."""

    place: int


def make_message(channel: Channel, place: int, payload: bytes, note: Note | None = None) -> Message:
    """The message of a record, with what the ledger and the notes say of it."""
    note = note or channel.topic.notes.get(place, payload)
    entry = channel.ledger.open.get(place) or channel.ledger.failed.get(place)
    enqueued_at = None if note is None else note.enqueued_at
    noted_tries = 0 if note is None else note.tries
    return Message(
        id=position_id(place) if note is None or note.id is None else note.id,
        queue=channel.topic.name,
        body=payload,
        tries=noted_tries if entry is None else entry.tries,
        enqueued_at=channel.topic.notes.written_at(place) if enqueued_at is None else enqueued_at,
    )


def claim(channel: Channel, limit: int, visibility: float) -> list[Lease]:
    """Lease up to `limit` records: what came back first, then what the log has next."""
    ledger = channel.ledger
    now = channel.topic.clock.time()
    ledger.make_due(now)
    channel.topic.notes.file.follow()
    chosen = _returned(channel, limit, now)
    cursor = ledger.cursor
    while len(chosen) < limit:
        found, cursor = channel.topic.log.read(cursor, limit - len(chosen), channel.end())
        if not found:
            break
        chosen += _fresh(channel, found, cursor, now)
    if not chosen:
        if cursor > ledger.cursor:
            channel.append([[Row.SKIP, cursor]])
        return []
    token, expires = ledger.token + 1, now + visibility
    channel.append([[Row.LEASE, expires, token, cursor, [place for place, _, _ in chosen]]])
    return [
        SqLease(
            message=make_message(channel, place, payload, note), token=token + index, expires_at=expires, place=place
        )
        for index, (place, payload, note) in enumerate(chosen)
    ]


def _returned(channel: Channel, limit: int, now: float) -> list[tuple[int, bytes, Note | None]]:
    chosen: list[tuple[int, bytes, Note | None]] = []
    for place in channel.ledger.next_ready(limit):
        entry = channel.ledger.open[place]
        payload = channel.body(place)
        if payload is None:
            _log.error("sq_record_lost", topic=channel.topic.name, channel=channel.name, id=position_id(place))
            channel.keep_body(place, b"")
            channel.append([[Row.FAIL, place, now, entry.tries, "its record cannot be read any more", 0]])
        else:
            chosen.append((place, payload, None))
    return chosen


def _fresh(
    channel: Channel, found: Sequence[tuple[int, bytes]], cursor: int, now: float
) -> list[tuple[int, bytes, Note | None]]:
    """What of the log's next records is to be leased now; the rest is set aside."""
    chosen: list[tuple[int, bytes, Note | None]] = []
    notes, skipped = channel.topic.notes, channel.ledger.skipped
    aside: list[list[Any]] = []
    for place, payload in found:
        if type(payload) is Damaged:
            set_damage_aside(channel, place, payload, now)
        elif skipped and place in skipped:
            continue
        elif place in notes.by_place and (note := notes.get(place, payload)) is not None:
            if note.due > now or note.tries:
                aside.append([place, note.due if note.due > now else 0.0, note.tries])
            if note.due <= now:
                chosen.append((place, payload, note))
        else:
            chosen.append((place, payload, None))
    if aside:
        # Not up to the cursor: what lies between is leased by the row that follows, or not at all.
        channel.append([[Row.ASIDE, 0, aside]])
    return chosen


def set_damage_aside(channel: Channel, place: int, payload: bytes, now: float) -> None:
    """Keep what stands in the place of a record with the failed messages. Idempotent."""
    _log.error(
        "sq_record_damaged",
        topic=channel.topic.name,
        channel=channel.name,
        id=position_id(place),
        bytes=len(payload),
    )
    if place in channel.ledger.failed or place in channel.ledger.open:
        return
    channel.keep_body(place, payload)
    channel.append([[Row.FAIL, place, now, 0, _DAMAGED, 0]])


def holds(channel: Channel, lease: Lease) -> bool:
    """Whether a lease still is the one that counts."""
    if not isinstance(lease, SqLease):
        return False
    entry = channel.ledger.open.get(lease.place)
    return entry is not None and entry.state is State.LEASED and entry.token == lease.token


def extend(channel: Channel, leases: Sequence[Lease], expires: float) -> list[Lease]:
    """Extend leases; the ones that are lost."""
    kept = [lease for lease in leases if isinstance(lease, SqLease) and holds(channel, lease)]
    if kept:
        channel.append([[Row.EXTEND, expires, [lease.place for lease in kept]]])
        for lease in kept:
            lease.expires_at = expires
    held = set(map(id, kept))
    return [lease for lease in leases if id(lease) not in held]


def settle(
    channel: Channel, settlements: Sequence[Settlement], now: float, done: list[tuple[int, int]]
) -> list[Settlement]:
    """End leases; the ones that were refused. Not durable before the channel's next commit.

    Args:
        channel: held.
        settlements: of this channel.
        now: Unix seconds.
        done: gets (place, token) of each that was ended, also when a later one raises.
    """
    refused: list[Settlement] = []
    acked: dict[int, int] = {}
    for settlement in settlements:
        lease = settlement.lease
        if isinstance(lease, SqLease) and (lease.place, lease.token) in channel.unsure:
            channel.unsure.discard((lease.place, lease.token))
            done.append((lease.place, lease.token))
        elif not isinstance(lease, SqLease) or lease.place in acked or not holds(channel, lease):
            refused.append(settlement)
        elif settlement.action is SettleAction.ACK:
            acked[lease.place] = lease.token
        else:
            _end(channel, settlement, lease.place, now)
            done.append((lease.place, lease.token))
    if acked:
        kept = [place for place in acked if channel.ledger.open[place].kept]
        channel.append([[Row.ACK, list(acked)]])
        channel.drop_bodies(kept)
        done += acked.items()
    return refused


def _end(channel: Channel, settlement: Settlement, place: int, now: float) -> None:
    due = now + settlement.delay if settlement.delay > 0 else 0.0
    error = None if settlement.error is None else settlement.error.encode(errors="replace").decode()
    if settlement.action is SettleAction.FAIL_PERM:
        channel.keep_body(place, settlement.lease.message.body)
        channel.append([[Row.FAIL, place, now, channel.ledger.open[place].tries, error, 0]])
    elif settlement.action is SettleAction.FAIL_TMP:
        channel.append([[Row.RETRY, place, due, error]])
    else:
        channel.append([[Row.RELEASE, place, due]])


def expire(channel: Channel, now: float) -> int:
    """Make expired leases and due records ready; how many there were."""
    expired = channel.ledger.expired(now)
    if expired:
        channel.append([[Row.EXPIRE, expired]])
    return len(expired) + channel.ledger.make_due(now)
