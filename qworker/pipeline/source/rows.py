"""Make record batches of messages and events, only with the requested columns."""

# The stubs of pyarrow leave the types of elements open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from qworker.history.event import Event
from qworker.message import StoredMessage

__all__ = ["events_batch", "messages_batch", "timestamps"]

_TIME = pa.timestamp("us", "UTC")
_TEXTS = pa.list_(pa.string())
_FIELDS = pa.map_(pa.string(), pa.string())
# The bytes with which JSON can begin. A body that begins differently is not an envelope, and is not decoded.
_OPENS = frozenset(b"{ \t\r\n")


class _Call(msgspec.Struct, frozen=True, gc=False):
    """An envelope whose arguments are not decoded."""

    task: str
    args: msgspec.Raw = msgspec.Raw(b"[]")
    kwargs: msgspec.Raw = msgspec.Raw(b"{}")


_decode = msgspec.json.Decoder(_Call).decode


def messages_batch(found: Sequence[StoredMessage], names: Sequence[str]) -> pa.RecordBatch:
    """Make some columns of the table `messages`."""
    arrays: dict[str, pa.Array[Any]] = {}
    if not _CALL_COLUMNS.isdisjoint(names):
        calls = [_call(one.message.body) for one in found]
        for name in _CALL_COLUMNS.intersection(names):
            arrays[name] = _strings(_CALLS[name](call) for call in calls)
    for name in names:
        if name not in arrays:
            arrays[name] = _COLUMNS[name](found)
    return pa.RecordBatch.from_arrays([arrays[name] for name in names], names=list(names))


def events_batch(found: Sequence[Event], names: Sequence[str], part: str, position: str | None) -> pa.RecordBatch:
    """Make some columns of the table `events`.

    Args:
        found: Some events of one log of the history.
        names: The columns, in order.
        part: The name of the log.
        position: The position after the events.
    """
    hidden = {"part": part, "position": position}
    arrays = [
        _strings([hidden[name]] * len(found)) if name in hidden else _EVENT_COLUMNS[name](found) for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _call(body: bytes) -> _Call | None:
    if not body or body[0] not in _OPENS:
        return None
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _json(raw: msgspec.Raw) -> str:
    return bytes(raw).decode(errors="replace")


def _strings(values: Iterable[str | None]) -> pa.Array[Any]:
    texts = list(values)
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        # Names of files may contain bytes that are not text.
        return pa.array([None if text is None else _text(text) for text in texts], pa.string())


def _same(values: Sequence[str]) -> pa.Array[Any]:
    """Make an array of texts that are nearly always the same."""
    first = values[0] if values else ""
    if values.count(first) == len(values):
        return pa.repeat(pa.scalar(str(first), pa.string()), len(values))
    return _strings(map(str, values))


def _lists(values: Iterable[tuple[str, ...]]) -> pa.Array[Any]:
    lists = list(values)
    try:
        return pa.array(lists, _TEXTS)
    except UnicodeEncodeError:
        return pa.array([tuple(_text(text) for text in texts) for texts in lists], _TEXTS)


def _text(text: str) -> str:
    return text.encode(errors="replace").decode()


def timestamps(values: Iterable[float | None]) -> pa.Array[Any]:
    """Convert Unix seconds to timestamps, with the microseconds of `message.to_microseconds`."""
    seconds = pa.array(list(values), pa.float64())
    return pc.cast(pc.cast(pc.round(pc.multiply(seconds, 1e6)), pa.int64()), _TIME)


_CALLS: dict[str, Callable[[_Call | None], str | None]] = {
    "task": lambda call: None if call is None else call.task,
    "args": lambda call: None if call is None else _json(call.args),
    "kwargs": lambda call: None if call is None else _json(call.kwargs),
}
_CALL_COLUMNS = frozenset(_CALLS)

_COLUMNS: dict[str, Callable[[Sequence[StoredMessage]], pa.Array[Any]]] = {
    "id": lambda found: _strings(one.message.id for one in found),
    "queue": lambda found: _same([one.message.queue for one in found]),
    "state": lambda found: _same([one.state for one in found]),
    "body": lambda found: pa.array([one.message.body for one in found], pa.binary()),
    "tries": lambda found: pa.array([one.message.tries for one in found], pa.int32()),
    "priority": lambda found: pa.array([one.message.priority for one in found], pa.int32()),
    "key": lambda found: _strings(one.message.unique_key for one in found),
    "enqueued_at": lambda found: timestamps(one.message.enqueued_at for one in found),
    "due_at": lambda found: timestamps(one.due_at for one in found),
    "expires_at": lambda found: timestamps(one.expires_at for one in found),
    "finished_at": lambda found: timestamps(one.finished_at for one in found),
    "holder": lambda found: _strings(one.holder for one in found),
    "error": lambda found: _strings(one.error for one in found),
    "arguments": lambda found: _lists(one.message.argv for one in found),
    "fields": lambda found: pa.array(
        [None if one.message.fields is None else list(one.message.fields.items()) for one in found], _FIELDS
    ),
    "place": lambda found: _strings(one.location for one in found),
}

_EVENT_COLUMNS: dict[str, Callable[[Sequence[Event]], pa.Array[Any]]] = {
    "event": lambda found: _strings(one.kind for one in found),
    "at": lambda found: timestamps(one.at for one in found),
    "queue": lambda found: _strings(one.queue for one in found),
    "id": lambda found: _strings(one.id for one in found),
    "task": lambda found: _strings(one.task for one in found),
    "tries": lambda found: pa.array([one.tries for one in found], pa.int32()),
    "worker": lambda found: _strings(one.worker for one in found),
    "token": lambda found: pa.array([one.token for one in found], pa.int64()),
    "duration_s": lambda found: pa.array([one.duration_s for one in found], pa.float64()),
    "enqueued_at": lambda found: timestamps(one.enqueued_at for one in found),
    "error": lambda found: _strings(one.error for one in found),
}
