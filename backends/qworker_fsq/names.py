"""Item names of fsq(7): `D<timestamp>D<entropy>D<pid>D<hostname>D<tries>[D<argument>]...`. No code here uses a disk.

D is the first character of the name. The delimiter, the escape character and `/` are written as the escape character
and two hexadecimal digits. Names are in the form of `os.fsdecode`: bytes that are not text are surrogates.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from qworker.errors import NotSupported
from qworker.names import printable
from qworker_fsq.environment import Constants

__all__ = ["MAX_NAME", "InvalidItemName", "Item", "construct", "deconstruct", "message_id", "parse", "with_tries"]

# The limit of file systems in bytes.
MAX_NAME = 255

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]*(?:_[A-Za-z0-9.:-]+){3}")
_LONGEST_ID = 120
# A name with the usual constants on ordinary hosts, up to its arguments: nothing in it is escaped.
_USUAL = re.compile(r"_(([0-9]{14})_([0-9]{1,20})_([0-9]{1,20})_([A-Za-z0-9.:-]{1,64}))_([0-9]{1,9})(?:_([^%]*))?")
_TIMEFMT = "%Y%m%d%H%M%S"
_UTF8 = frozenset({"utf8", "utf-8", "UTF-8", "UTF8"})


class InvalidItemName(Exception):
    """A file name that is not the name of an item."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """The fields of an item's name."""

    # The first four fields, which are the same at every try.
    id: str
    entropy: str
    pid: str
    hostname: str
    tries: int
    arguments: tuple[str, ...]
    # Unix seconds.
    enqueued_at: float


# -- writing ---------------------------------------------------------------------------------------------------------


def construct(fields: Sequence[str], constants: Constants) -> str:
    """Return the name that has these fields.

    Raises:
        NotSupported: No file can have it.
    """
    delimiter, escape = constants.delimiter, constants.encode
    name = "".join([delimiter + _encode(field, delimiter, escape, constants.charset) for field in fields])
    if (len(name) if name.isascii() else len(os.fsencode(name))) > MAX_NAME:
        raise NotSupported(
            f"fsq: argv must fit into the name of a file ({MAX_NAME} bytes): put long texts into the body"
        )
    return name


def _encode(field: str, delimiter: str, escape: str, charset: str) -> str:
    if "\0" in field:
        raise NotSupported(
            "fsq: argv must not contain NUL, because it becomes part of a file name: put it into the body"
        )
    field = field.translate(_escapes(delimiter, escape))
    if field.isascii() or charset in _UTF8:
        return field
    try:
        return os.fsdecode(field.encode(charset, "surrogateescape"))
    except UnicodeEncodeError as error:
        raise NotSupported(f"fsq: argv has characters that FSQ_CHARSET={charset} cannot encode") from error


@lru_cache(maxsize=16)
def _escapes(delimiter: str, escape: str) -> dict[int, str]:
    return {ord(character): f"{escape}{ord(character):02x}" for character in (delimiter, escape, "/")}


def with_tries(name: str, tries: int, constants: Constants) -> str:
    """Return the name of the same item with another number of failed attempts."""
    delimiter = name[0]
    raw = _split(name, constants.encode)
    raw[4] = _encode(str(tries), delimiter, constants.encode, constants.charset)
    return delimiter + delimiter.join(raw)


# -- reading ---------------------------------------------------------------------------------------------------------


def deconstruct(name: str, constants: Constants) -> list[str]:
    """Return the fields of a name, decoded.

    Raises:
        InvalidItemName: An escape is truncated or not hexadecimal, or the first character cannot be a delimiter.
    """
    if not name:
        raise InvalidItemName("an empty name has no delimiter")
    if not name[0].isascii() or name[0] == constants.encode:
        raise InvalidItemName(f"{name[0]!r} cannot be a delimiter")
    return [_decode(field, constants) for field in _split(name, constants.encode)]


def _split(name: str, escape: str) -> list[str]:
    delimiter = name[0]
    if escape not in name or delimiter not in "0123456789abcdefABCDEF":
        return name[1:].split(delimiter)
    # The two digits of an escape are never delimiters.
    fields: list[str] = []
    at = begin = 1
    while at < len(name):
        if name[at] == escape:
            at += 3
            continue
        if name[at] == delimiter:
            fields.append(name[begin:at])
            begin = at + 1
        at += 1
    fields.append(name[begin:])
    return fields


def _decode(field: str, constants: Constants) -> str:
    escape = constants.encode
    if escape in field:
        # Bytes that were escaped one by one may be a character together.
        field = os.fsdecode(os.fsencode(_escaped(escape).sub(_unescape, field)))
    if field.isascii() or constants.charset in _UTF8:
        return field
    return os.fsencode(field).decode(constants.charset, "surrogateescape")


@lru_cache(maxsize=16)
def _escaped(escape: str) -> re.Pattern[str]:
    return re.compile(f"{re.escape(escape)}([0-9a-fA-F]{{2}})?")


def _unescape(match: re.Match[str]) -> str:
    if match[1] is None:
        raise InvalidItemName(f"an escape in {printable(match.string)!r} is truncated or not hexadecimal")
    return os.fsdecode(bytes([int(match[1], 16)]))


def parse(name: str, constants: Constants) -> Item:
    """Read the name of an item.

    Raises:
        InvalidItemName: It is not valid.
    """
    usual = _USUAL.fullmatch(name)
    if usual is not None and constants.is_usual and (second := _second(usual[2], _TIMEFMT)) is not None:
        stem, _, entropy, pid, hostname, tries, words = usual.groups()
        fraction = int(entropy) / 1e9 if len(entropy) == 9 else 0.0
        arguments = () if words is None else tuple(words.split("_"))
        return Item(stem, entropy, pid, hostname, int(tries), arguments, second + fraction)
    fields = deconstruct(name, constants)
    if len(fields) < 5:
        raise InvalidItemName(f"a name must have at least 5 fields (got {len(fields)})")
    stamp, entropy, pid, hostname, tries = fields[:5]
    if not (tries.isascii() and tries.isdigit() and len(tries) <= 9):
        raise InvalidItemName(f"tries must be a number (got {tries!r})")
    second = _second(stamp, constants.timefmt)
    if second is None:
        raise InvalidItemName(f"{stamp!r} is not a time of the form {constants.timefmt}")
    # In items that qworker enqueues, the entropy is the nanoseconds.
    fraction = int(entropy) / 1e9 if len(entropy) == 9 and entropy.isascii() and entropy.isdigit() else 0.0
    return Item(message_id(name, constants), entropy, pid, hostname, int(tries), tuple(fields[5:]), second + fraction)


@lru_cache(maxsize=256)
def _second(stamp: str, timefmt: str) -> float | None:
    try:
        return time.mktime(time.strptime(stamp, timefmt))
    except (ValueError, OverflowError):
        return None


def message_id(name: str, constants: Constants) -> str:
    """Return the id of the message in a file: the fixed part of an item's name, or a digest of another name."""
    if name and name[0] != constants.encode:
        fields = _split(name, constants.encode)
        if len(fields) >= 5:
            plain = "_".join(fields[:4])
            if len(plain) <= _LONGEST_ID and _ID.fullmatch(plain):
                return plain
            name = name[0].join(fields[:4])
    return "x-" + hashlib.sha256(os.fsencode(name)).hexdigest()[:40]
