"""Messages as flat maps of text to text, which rfq stores.

A map of another program is `Message.fields`, and the body is empty. A body, such as a task's envelope, is the value of
the field `qworker`. If it is not UTF-8, it is the value of `qworker64`, in base64, so that a map is text to text for
every reader.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from typing import cast

from qworker.errors import BackendError, InvalidArguments
from qworker.message import Draft, Message
from qworker_redis.codec import PlainDraft
from qworker_redis.error_replies import Reply
from qworker_redis.rfq.ids import published_at

__all__ = ["BODY", "BODY_BASE64", "decode", "decode_leniently", "encode", "pack_fields", "to_fields"]

BODY = "qworker"
BODY_BASE64 = "qworker64"
_RESERVED = (BODY, BODY_BASE64)

# Tries, delay, due time and time of enqueueing in microseconds, 1 for the front; then the id in another store.
_SPECIAL = struct.Struct(">HQQQB")
# Tries; when it was enqueued (microseconds, or nothing); the list of HGETALL or an error's text; and the id in the
# other store.
_Value = tuple[int, bytes, bytes | list[bytes], bytes]
_LENGTH = struct.Struct(">I")


def encode(message_id: str, draft: Draft) -> PlainDraft:
    """Encode a draft for the publish script.

    Args:
        message_id: The id of the draft, or a new one.
        draft: The checked draft.

    Raises:
        InvalidArguments: A field is not a text, or has a name that qworker uses.
    """
    fields: list[str | bytes] = []
    if draft.fields:
        for name, value in draft.fields.items():
            if name in _RESERVED:
                raise InvalidArguments(f"rfq: the field {name!r} is reserved for the body: give the text as the body")
            fields += [name, value]
    if draft.body or not fields:
        fields += _body(draft.body)
    return message_id, _special(draft), pack_fields(fields)


def pack_fields(fields: Sequence[str | bytes]) -> bytes:
    """Encode names and values for the publish script.

    Raises:
        InvalidArguments: One of them is not a text.
    """
    try:
        parts = [field if isinstance(field, bytes) else field.encode() for field in fields]
    except (UnicodeEncodeError, AttributeError) as error:
        raise InvalidArguments(f"rfq: fields must be text: {error}") from error
    return b"".join([_LENGTH.pack(len(part)) + part for part in parts])


def _body(body: bytes) -> list[str | bytes]:
    try:
        body.decode()
    except UnicodeDecodeError:
        return [BODY_BASE64, base64.b64encode(body)]
    return [BODY, body]


def _special(draft: Draft) -> bytes:
    if (
        draft.id is None
        and draft.delay <= 0
        and draft.due_at is None
        and not draft.tries
        and draft.enqueued_at is None
        and draft.original_id is None
    ):
        return b""
    # A due time in the past is a due time. 0 means that there is no due time.
    due = 0 if draft.due_at is None else max(1, int(draft.due_at * 1e6))
    since = 0 if draft.enqueued_at is None else max(1, round(draft.enqueued_at * 1e6))
    head = _SPECIAL.pack(min(draft.tries, 0xFFFF), max(0, int(draft.delay * 1e6)), due, since, 0)
    return head + (draft.original_id or "").encode(errors="surrogateescape")


def decode(queue: str, message_id: str, value: Reply) -> Message:
    """Decode a value.

    Raises:
        BackendError: It is not a map of text to text.
    """
    tries, since, raw, origin = cast("_Value", value)
    if isinstance(raw, bytes):
        raise BackendError(f"the message {message_id} of {queue} is not a hash: {raw.decode(errors='replace')}")
    try:
        fields = to_fields(raw)
    except UnicodeDecodeError as error:
        raise BackendError(f"the message {message_id} of {queue} is not a map of text to text: {error}") from error
    body = _take_body(queue, message_id, fields)
    return Message(
        id=message_id,
        queue=queue,
        body=body,
        tries=tries,
        enqueued_at=_enqueued_at(message_id, since),
        fields=fields or None,
        original_id=origin.decode(errors="surrogateescape") or None,
    )


def decode_leniently(queue: str, message_id: str, value: Reply) -> Message:
    """Decode any value, for display."""
    try:
        return decode(queue, message_id, value)
    except BackendError:
        tries, since, raw, _ = cast("_Value", value)
        texts = [] if isinstance(raw, bytes) else [part.decode(errors="backslashreplace") for part in raw]
        fields = dict(zip(texts[::2], texts[1::2], strict=True)) or None
        at = _enqueued_at(message_id, since)
        return Message(id=message_id, queue=queue, body=b"", tries=tries, enqueued_at=at, fields=fields)


def to_fields(raw: Sequence[bytes]) -> dict[str, str]:
    """Make a map from the answer to HGETALL.

    Raises:
        UnicodeDecodeError: It is not text to text.
    """
    return {raw[at].decode(): raw[at + 1].decode() for at in range(0, len(raw), 2)}


def _take_body(queue: str, message_id: str, fields: dict[str, str]) -> bytes:
    """Remove the body from a map and return it."""
    body = b""
    if BODY in fields:
        body = fields.pop(BODY).encode()
    elif BODY_BASE64 in fields:
        try:
            body = base64.b64decode(fields[BODY_BASE64], validate=True)
        except (binascii.Error, ValueError) as error:
            raise BackendError(
                f"the message {message_id} of {queue} has a body that is not valid base64: {error}"
            ) from error
        del fields[BODY_BASE64]
    return body


def _enqueued_at(message_id: str, since: bytes) -> float:
    return int(since) / 1e6 if since else published_at(message_id) or 0.0
