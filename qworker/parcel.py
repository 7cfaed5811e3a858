"""A message on a protocol that has no place for its fields or arguments: they travel in the body, as docs/envelope.md describes.

Whoever moves a message packs it where it must be, and unpacks it where it need not be any more. A worker unpacks what it leases, so
that a raw handler gets the message as it was published.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from qworker.message import Draft, Message

__all__ = ["pack", "unpack"]

_BEGINNING = b'{"qworker":"message"'


class _Parcel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="qworker", tag="message"):
    """What the body has. The tag comes first: it is what a parcel is known by."""

    body: str = ""
    # Instead, where the body is no UTF-8.
    body_base64: bytes = b""
    fields: Mapping[str, str] | None = None
    arguments: tuple[str, ...] = ()
    # Instead, where one of them is no UTF-8: arguments may come from names of files.
    arguments_base64: tuple[bytes, ...] = ()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Parcel).decode


def pack(draft: Draft, *, even_empty: bool = False) -> Draft:
    """A draft with its fields and arguments in the body; the same one where it has none.

    Args:
        draft: not packed yet.
        even_empty: pack it all the same, for a protocol that has no empty bodies.
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
    """The message that was packed; the same one where it is no parcel, or a damaged one."""
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
