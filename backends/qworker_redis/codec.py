"""The value of a message in Redis: a part for scripts (`lua/common.lua`), a part for clients only, and the body."""

from __future__ import annotations

import struct

import msgspec

from qworker.backend.deviations import check_draft
from qworker.errors import BackendError
from qworker.message import Draft, KeyHolder, Message
from qworker.names import check_key
from qworker.unique import Unique, float_of

__all__ = [
    "GIVEN_ID",
    "PlainDraft",
    "decode",
    "decode_holder",
    "decode_key",
    "encode",
    "encode_text",
    "mark_given",
    "read_enqueued_at",
]

# Tries, order in microseconds, priority, flags. The scripts put the first two in front of the value from `encode`.
_HEAD = struct.Struct(">HQBB")
# Tries, delay and due time in microseconds, priority; then the hold, if there is one, and the key.
_SPECIAL = struct.Struct(">HQQB")
# Added to the priority if the time for which the id stays taken is next, if the id was given, and if the options of the
# unique key are next: what is done if a waiting message has it, and two times in microseconds.
_HOLD = 128
_GIVEN = 64
_UNIQUE = 32
_OPTIONS = struct.Struct(">BQQ")
_AGAIN = {"keep": 0, "error": 0, "replace": 1, "debounce": 2}
_STARTED = 4
_IN_ALL_QUEUES = 8
_KEY, _MORE = 1, 2
# In place of the properties of a message that has nothing unusual but an id that was given.
GIVEN_ID = b"i"
# The bits of the flags above them are the deaths.
_DEATHS_SHIFT = 2
_PLAIN_REST = b"\0\0"
_HOLD_TIME = struct.Struct(">Q")
_EXTRA_LENGTH = struct.Struct(">I")

PlainDraft = tuple[str, bytes, bytes]


class _Extra(msgspec.Struct, array_like=True):
    """The parts of a message that few messages have."""

    enqueued_at: float | None = None
    # Other programs may have written them, so they need not be UTF-8.
    arguments: tuple[bytes, ...] = ()
    fields: dict[str, str] | None = None
    # The options of the unique key: `a` if it counts in all queues, `s` if it is free from the first lease on.
    key_options: str = ""


_encoder = msgspec.msgpack.Encoder()
_extra_decoder = msgspec.msgpack.Decoder(_Extra)


def encode(message_id: str, draft: Draft) -> PlainDraft:
    """Encode a draft for the publish script, and return three parts.

    Returns:
        Its id, its unusual properties (empty if it has none), and its value.

    Raises:
        InvalidName: The key is too long.
        UsageError: The priority is not 0 to 9.
    """
    if (
        draft.unique_key is None
        and not draft.priority
        and draft.delay <= 0
        and draft.due_at is None
        and not draft.tries
        and draft.enqueued_at is None
        and not draft.argv
        and draft.fields is None
        and not draft.hold
    ):
        return message_id, b"", _PLAIN_REST + draft.body
    return message_id, _special(draft), _rest(draft)


def mark_given(special: bytes) -> bytes:
    """Return the unusual properties of a message whose id was given."""
    if not special:
        return GIVEN_ID
    tries, delay, due, priority = _SPECIAL.unpack_from(special)
    return _SPECIAL.pack(tries, delay, due, priority + _GIVEN) + special[_SPECIAL.size :]


def _special(draft: Draft) -> bytes:
    check_draft(draft)
    key = b"" if draft.unique_key is None else check_key(draft.unique_key).encode(errors="surrogateescape")
    # A due time in the past is a due time. 0 means that there is no due time.
    due = 0 if draft.due_at is None else max(1, int(draft.due_at * 1e6))
    hold = _HOLD_TIME.pack(int(draft.hold * 1e6)) if draft.hold > 0 else b""
    priority = draft.priority + (_HOLD if hold else 0)
    options = b"" if draft.unique is None else _options(draft.unique)
    if options:
        priority += _UNIQUE
    return _SPECIAL.pack(min(draft.tries, 0xFFFF), max(0, int(draft.delay * 1e6)), due, priority) + hold + options + key


def _options(unique: Unique) -> bytes:
    """Return the options of a unique key; empty if they are the usual ones."""
    again = _AGAIN[unique.again] + (_STARTED if unique.until == "started" else 0)
    again += _IN_ALL_QUEUES if unique.scope == "app" else 0
    if not again:
        return b""
    most = 0 if unique.at_most is None else int(float_of(unique.at_most) * 1e6)
    return _OPTIONS.pack(again, int(float_of(unique.wait) * 1e6), most)


def _rest(draft: Draft) -> bytes:
    flags, parts = 0, b""
    if draft.unique_key is not None:
        flags |= _KEY
        key = draft.unique_key.encode(errors="surrogateescape")
        parts = bytes((len(key),)) + key
    options = "" if draft.unique is None else _key_options(draft.unique)
    if draft.enqueued_at is not None or draft.argv or draft.fields is not None or options:
        flags |= _MORE
        fields = None if draft.fields is None else dict(draft.fields)
        arguments = tuple(argument.encode(errors="surrogateescape") for argument in draft.argv)
        extra = _encoder.encode(_Extra(draft.enqueued_at, arguments, fields, options))
        parts += _EXTRA_LENGTH.pack(len(extra)) + extra
    return bytes((draft.priority, flags)) + parts + draft.body


def _key_options(unique: Unique) -> str:
    return ("a" if unique.scope == "app" else "") + ("s" if unique.until == "started" else "")


def _unique_of(options: str) -> Unique | None:
    return Unique(until="started" if "s" in options else "done", scope="app" if "a" in options else "queue").stored()


def decode(queue: str, message_id: str, value: bytes) -> Message:
    """Decode a value.

    Raises:
        BackendError: qworker did not write the value.
    """
    try:
        tries, order, priority, flags = _HEAD.unpack_from(value)
        if not flags:
            return Message(
                id=message_id, queue=queue, body=value[12:], tries=tries, enqueued_at=order / 1e6, priority=priority
            )
        key, extra, body = _parts(value, flags)
    except (struct.error, IndexError, ValueError) as error:
        raise BackendError(f"the message {message_id} of {queue} is damaged: remove it by its id") from error
    return Message(
        id=message_id,
        queue=queue,
        body=body,
        tries=tries,
        enqueued_at=order / 1e6 if extra.enqueued_at is None else extra.enqueued_at,
        priority=priority,
        unique_key=key,
        unique=_unique_of(extra.key_options) if extra.key_options else None,
        argv=tuple(argument.decode(errors="surrogateescape") for argument in extra.arguments),
        fields=extra.fields,
        deaths=flags >> _DEATHS_SHIFT,
    )


def _parts(value: bytes, flags: int) -> tuple[str | None, _Extra, bytes]:
    at, key, extra = 12, None, _Extra()
    if flags & _KEY:
        end = at + 1 + value[at]
        key = value[at + 1 : end].decode(errors="surrogateescape")
        at = end
    if flags & _MORE:
        (length,) = _EXTRA_LENGTH.unpack_from(value, at)
        at += _EXTRA_LENGTH.size
        extra = _extra_decoder.decode(value[at : at + length])
        at += length
    return key, extra, value[at:]


def decode_key(key: bytes) -> str:
    """Decode a unique key."""
    return key.decode(errors="surrogateescape")


def decode_holder(name: bytes) -> str:
    """Return the id of the message that has a unique key, with its queue if that is another one."""
    queue, slash, message_id = name.decode().partition("/")
    return KeyHolder(message_id, queue) if slash else queue


def encode_text(text: str) -> bytes:
    """Encode an id or a text of `place_of` as it is in the store."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        # No id has a lone surrogate, so this one is not found.
        return text.encode(errors="surrogatepass")


def read_enqueued_at(value: bytes) -> float:
    """Return when the message of a value was published, in Unix seconds."""
    return decode("", "", value).enqueued_at
