"""Leasing from a channel and extending leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from qworker.kit.segments.log import Damaged
from qworker.kit.store_errors import store_errors
from qworker.message import Lease, Message, State
from qworker_sq.channel import Channel
from qworker_sq.ledger import RowKind
from qworker_sq.names import position_id
from qworker_sq.record_info import RecordInfo

__all__ = ["SqLease", "claim", "extend_leases", "is_held", "make_message", "move_damaged_to_failed"]

_log = structlog.get_logger("qworker.sq")
_DAMAGED = "a damaged record: its length or checksum is wrong; the bytes in the log are kept as the body"


class SqLease(Lease, kw_only=True, eq=False, weakref=True):
    """A lease, and the place of its record."""

    place: int


def make_message(channel: Channel, place: int, payload: bytes, info: RecordInfo | None = None) -> Message:
    """Return the message of a record, with its data in the ledger and the infos."""
    info = info or channel.topic.infos.get(place, payload)
    entry = channel.ledger.open.get(place) or channel.ledger.failed.get(place)
    enqueued_at = None if info is None else info.enqueued_at
    info_tries = 0 if info is None else info.tries
    return Message(
        id=position_id(place) if info is None or info.id is None else info.id,
        queue=channel.topic.name,
        body=payload,
        tries=info_tries if entry is None else entry.tries,
        enqueued_at=channel.topic.infos.written_at(place) if enqueued_at is None else enqueued_at,
    )


def claim(channel: Channel, limit: int, visibility: float) -> list[Lease]:
    """Lease up to `limit` records, in a section: returned ones first, then the next ones of the log."""
    ledger = channel.ledger
    if ledger.paused or not channel.acquire_ownership():
        return []
    now = channel.topic.clock.time()
    ledger.make_due(now)
    channel.topic.infos.file.follow()
    chosen = _returned(channel, limit, now)
    cursor = ledger.cursor
    while len(chosen) < limit:
        found, cursor = channel.topic.log.read(cursor, limit - len(chosen), channel.end())
        if not found:
            break
        chosen += _fresh(channel, found, cursor, now)
    if not chosen:
        if cursor > ledger.cursor:
            channel.append([[RowKind.SKIP, cursor]])
        return []
    token, expires = ledger.token + 1, now + visibility
    channel.append([[RowKind.LEASE, expires, token, cursor, [place for place, _, _ in chosen]]])
    return [
        SqLease(
            message=make_message(channel, place, payload, info), token=token + index, expires_at=expires, place=place
        )
        for index, (place, payload, info) in enumerate(chosen)
    ]


def _returned(channel: Channel, limit: int, now: float) -> list[tuple[int, bytes, RecordInfo | None]]:
    chosen: list[tuple[int, bytes, RecordInfo | None]] = []
    for place in channel.ledger.next_ready(limit):
        entry = channel.ledger.open[place]
        payload = channel.read_body(place)
        if payload is None:
            _log.error("sq_record_lost", topic=channel.topic.name, channel=channel.name, id=position_id(place))
            channel.keep_body(place, b"")
            channel.append([[RowKind.FAIL, place, now, entry.tries, "its record cannot be read any more", 0]])
        else:
            chosen.append((place, payload, None))
    return chosen


def _fresh(
    channel: Channel, found: Sequence[tuple[int, bytes]], cursor: int, now: float
) -> list[tuple[int, bytes, RecordInfo | None]]:
    """Return which of the log's next records are leased now. The others become delayed or failed."""
    chosen: list[tuple[int, bytes, RecordInfo | None]] = []
    infos, skipped = channel.topic.infos, channel.ledger.skipped
    delayed: list[list[Any]] = []
    for place, payload in found:
        if type(payload) is Damaged:
            move_damaged_to_failed(channel, place, payload, now)
        elif skipped and place in skipped:
            continue
        elif place in infos.by_place and (info := infos.get(place, payload)) is not None:
            if info.due > now or info.tries:
                delayed.append([place, info.due if info.due > now else 0.0, info.tries])
            if info.due <= now:
                chosen.append((place, payload, info))
        else:
            chosen.append((place, payload, None))
    if delayed:
        # The row does not go up to the cursor: the records in between are leased by the row that follows, or not at
        # all.
        channel.append([[RowKind.ASIDE, 0, delayed]])
    return chosen


def move_damaged_to_failed(channel: Channel, place: int, payload: bytes, now: float) -> None:
    """Keep the bytes in the place of a record as a failed message, in a section. Idempotent."""
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
    channel.append([[RowKind.FAIL, place, now, 0, _DAMAGED, 0]])


def is_held(channel: Channel, lease: Lease) -> bool:
    """Return whether a lease is still valid."""
    if not isinstance(lease, SqLease):
        return False
    entry = channel.ledger.open.get(lease.place)
    return entry is not None and entry.state is State.LEASED and entry.token == lease.token


def extend_leases(channel: Channel, leases: Sequence[Lease], visibility: float) -> list[Lease]:
    """Extend leases, from any thread, and return the lost ones."""
    with store_errors(f"extend leases of {channel.topic.name}"), channel.blocking_section():
        expires = channel.topic.clock.time() + visibility
        kept = [lease for lease in leases if isinstance(lease, SqLease) and is_held(channel, lease)]
        if kept:
            channel.append([[RowKind.EXTEND, expires, [lease.place for lease in kept]]])
            for lease in kept:
                lease.expires_at = expires
    extended = set(map(id, kept))
    return [lease for lease in leases if id(lease) not in extended]
