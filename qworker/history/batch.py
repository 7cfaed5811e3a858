"""The stored form of events: the transitions of many messages in one record, in columns. Readers make `Event`s of it.

A record is one JSON object with the fields of `EventBatch`. A column is a list as long as `id`, or a list as long as
`groups` with one value for each group of messages, or one value for all. A worker records most messages once, when they
finish. Such a record also states when they were leased and published (`begins`), so that no id is written three times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import TypeVar, cast

import msgspec

from qworker.history.event import Event, Kind

__all__ = ["EventBatch", "decode_batch", "decode_with", "encode_batch", "to_batches"]

T = TypeVar("T")

# Messages in one record; readers read whole records.
_MOST = 256


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One transition of each of some messages of one queue.

    Attributes:
        kind: What happened. Its stored name is `event`.
        queue: The queue of the messages.
        worker: The worker that recorded it.
        at: When it happened, in Unix seconds.
        id: The ids of the messages.
        groups: The numbers of consecutive messages that share a value of the columns that are as long as this.
        task: The names of the tasks.
        tries: Failed attempts before the delivery.
        token: The fencing tokens.
        enqueued_at: When the messages were published, in Unix seconds.
        duration_us: Microseconds that the handlers ran.
        error: The reasons, in one line each.
        text: The complete errors, if the store does not keep them.
        begins: True if the record also states that the messages were leased (at `leased_at`), and those without tries
            published.
        leased_at: When the messages were leased, in Unix seconds.
    """

    kind: Kind = msgspec.field(name="event")
    queue: str
    worker: str
    at: float | list[float]
    id: list[str]
    groups: list[int] = []
    task: str | list[str | None] | None = None
    tries: int | list[int] = 0
    token: int | list[int | None] | None = None
    enqueued_at: float | list[float | None] | None = None
    duration_us: int | list[int | None] | None = None
    error: str | list[str | None] | None = None
    text: str | list[str | None] | None = None
    begins: bool = False
    leased_at: float | list[float | None] | None = None

    @property
    def last_at(self) -> float:
        """When the last of the transitions happened."""
        return max(self.at, default=0.0) if isinstance(self.at, list) else self.at

    def events(self) -> list[Event]:
        """Return the transitions. Those of one message are in order."""
        found: list[Event] = []
        for at, name, task, tries, token, enqueued_at, duration, error, text, leased_at in self._rows():
            known = _EventDefaults(self.queue, self.worker, name, task, tries, enqueued_at)
            if self.begins and tries == 0 and enqueued_at:
                found.append(known.event("enqueued", enqueued_at))
            if self.begins and self.kind != "leased" and leased_at is not None:
                found.append(known.event("leased", leased_at, token))
            seconds = None if duration is None else duration / 1e6
            found.append(known.event(self.kind, at, token, seconds, error, text))
        return found

    def _rows(
        self,
    ) -> Iterator[
        tuple[
            float,
            str,
            str | None,
            int,
            int | None,
            float | None,
            int | None,
            str | None,
            str | None,
            float | None,
        ]
    ]:
        return zip(
            self.column(self.at),
            self.id,
            self.column(self.task),
            self.column(self.tries),
            self.column(self.token),
            self.column(self.enqueued_at),
            self.column(self.duration_us),
            self.column(self.error),
            self.column(self.text),
            self.column(self.leased_at),
            strict=False,
        )

    def column(self, value: T | list[T]) -> Iterable[T]:
        """Return a column's value for each message."""
        if not isinstance(value, list):
            return repeat(value, len(self.id))
        values = cast("list[T]", value)
        if len(values) == len(self.id):
            return values
        return chain.from_iterable(map(repeat, values, self.groups))


class _EventDefaults(msgspec.Struct, frozen=True, gc=False):
    """The fields that all events of one message have in common."""

    queue: str
    worker: str
    id: str
    task: str | None
    tries: int
    enqueued_at: float | None

    def event(
        self,
        kind: Kind,
        at: float,
        token: int | None = None,
        duration_s: float | None = None,
        error: str | None = None,
        text: str | None = None,
    ) -> Event:
        return Event(
            kind=kind,
            at=at,
            queue=self.queue,
            id=self.id,
            task=self.task,
            tries=self.tries,
            worker=self.worker,
            token=token,
            duration_s=duration_s,
            enqueued_at=self.enqueued_at,
            error=error,
            text=text,
        )


def to_batches(events: Iterable[Event]) -> list[EventBatch]:
    """Make batches of events, in this order."""
    batches: list[EventBatch] = []
    for (kind, queue, worker), run in groupby(events, lambda one: (one.kind, one.queue, one.worker)):
        rows = list(run)
        for first in range(0, len(rows), _MOST):
            some = rows[first : first + _MOST]
            batches.append(
                EventBatch(
                    kind=kind,
                    queue=queue,
                    worker=worker,
                    at=[row.at for row in some],
                    id=[row.id for row in some],
                    task=[row.task for row in some],
                    tries=[row.tries for row in some],
                    token=[row.token for row in some],
                    enqueued_at=[row.enqueued_at for row in some],
                    duration_us=[None if row.duration_s is None else round(row.duration_s * 1e6) for row in some],
                    error=[row.error for row in some],
                    text=[row.text for row in some] if any(row.text for row in some) else None,
                )
            )
    return batches


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(EventBatch).decode


def encode_batch(batch: EventBatch) -> bytes:
    """Encode the payload of a record."""
    try:
        return _encode(batch)
    except UnicodeEncodeError:
        # A name from another program that is not valid UTF-8.
        return _encode(
            msgspec.structs.replace(
                batch,
                id=[_text(name) for name in batch.id],
                task=_cleaned(batch.task),
                error=_cleaned(batch.error),
                text=_cleaned(batch.text),
            )
        )


def _cleaned(column: str | list[str | None] | None) -> str | list[str | None] | None:
    if isinstance(column, list):
        return [None if text is None else _text(text) for text in column]
    return None if column is None else _text(column)


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()


def decode_batch(payload: bytes) -> EventBatch | None:
    """Decode a record. Return None if it is damaged or not a batch."""
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_with(payloads: Sequence[bytes], needles: Collection[bytes]) -> list[EventBatch]:
    """Decode the records that contain all needles, and the last one."""
    chosen = [one for one in payloads[:-1] if all(needle in one for needle in needles)]
    return [batch for one in (*chosen, *payloads[-1:]) if (batch := decode_batch(one)) is not None]
