"""Parcels: message bodies that wrap fields or argv for protocols that have no place for them.

docs/reference/envelope.md describes the format. `qworker move` packs a message if the target needs it, and unpacks it
if the target does not. A worker unpacks the messages that it leases, so a raw handler gets the message as it was
published.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from qworker.message import Draft, Message

__all__ = ["pack", "unpack"]

_BEGINNING = b'{"qworker":"message"'


class _Parcel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="qworker", tag="message"):
    """The JSON object in the body. It begins with the tag, by which `unpack` recognizes a parcel."""

    body: str = ""
    # This field replaces `body` if the body is not valid UTF-8.
    body_base64: bytes = b""
    fields: Mapping[str, str] | None = None
    arguments: tuple[str, ...] = ()
    # This field replaces `arguments` if one of them is not valid UTF-8. They can come from names of files.
    arguments_base64: tuple[bytes, ...] = ()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Parcel).decode


def pack(draft: Draft, *, even_empty: bool = False) -> Draft:
    """Return a draft with its fields and argv in the body, or the same draft if it has none.

    Args:
        draft: A draft that is not packed.
        even_empty: Whether to pack a draft without fields and argv too, for a protocol that refuses empty bodies.
    """
    if not (draft.fields or draft.argv or even_empty):
        return draft
    text, binary = _text(draft.body)
    words: tuple[str, ...] = draft.argv
    raw: tuple[bytes, ...] = ()
    if any(not _is_text(word) for word in words):
        raw = tuple(word.encode(errors="surrogateescape") for word in words)
        words = ()
    parcel = _Parcel(body=text, body_base64=binary, fields=draft.fields or None, arguments=words, arguments_base64=raw)
    return msgspec.structs.replace(draft, body=_encode(parcel), fields=None, argv=())


def unpack(message: Message) -> Message:
    """Return the message that was packed, or the same message if its body is not a valid parcel."""
    if not message.body.startswith(_BEGINNING):
        return message
    try:
        parcel = _decode(message.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return message
    return msgspec.structs.replace(
        message,
        body=parcel.body_base64 or parcel.body.encode(),
        fields=parcel.fields,
        argv=parcel.arguments or tuple(word.decode(errors="surrogateescape") for word in parcel.arguments_base64),
    )


def _text(body: bytes) -> tuple[str, bytes]:
    try:
        return body.decode(), b""
    except UnicodeDecodeError:
        return "", body


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
