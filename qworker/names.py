"""Checks of names that enter the process: queue names, message ids and unique keys.

A queue name becomes a directory, a Redis key and a URL path. A message id becomes a part of a file name. Both are
decoded and checked once, when they enter. No other code has to handle path traversal, control characters or separators.

qworker creates only queues whose names have ASCII letters (`check_queue`). Other programs create queues with other
names too, and qworker reads them and runs their messages (`check_existing_queue`).
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import socket
import time
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from qworker.errors import InvalidName

__all__ = [
    "MOST_KEY",
    "check_existing_queue",
    "check_id",
    "check_key",
    "check_queue",
    "counted",
    "created_id",
    "failure_id",
    "failure_id_text",
    "forms_of_all",
    "id_forms",
    "is_created_id",
    "is_existing_queue_name",
    "is_queue_name",
    "new_id",
    "new_ids",
    "printable",
    "to_message_id",
]

_QUEUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Bytes of the longest name of a queue that another program created.
_MOST_EXISTING = 200
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,119}")
# The form of `new_ids`.
_GENERATED = re.compile(r"[0-9]{14}_[0-9]{9}_[0-9]+_[A-Za-z0-9.-]+-[0-9a-f]{8}")
# Bytes of the longest given id that is a message id unchanged.
_MOST_UNCHANGED = 64
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@lru_cache(maxsize=1024)
def check_queue(name: str) -> str:
    """Return `name` if qworker can create a queue with this name.

    Raises:
        InvalidName: It does not match `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`.
    """
    if not _QUEUE.fullmatch(name):
        raise _invalid_queue(name)
    return name


@lru_cache(maxsize=1024)
def check_existing_queue(name: str) -> str:
    """Return `name` if it is a queue name, also one that only other programs create.

    Raises:
        InvalidName: It has something else than letters and digits of any script, and `. _ : -`, or more than 200 bytes.
    """
    if not is_existing_queue_name(name):
        raise _invalid_queue(name)
    return name


def _invalid_queue(name: str) -> InvalidName:
    return InvalidName(
        f"{printable(name)!r} is not a valid queue name: use 1 to 64 of A-Z a-z 0-9 . _ -"
        " and start with a letter or digit"
    )


@lru_cache(maxsize=1024)
def is_queue_name(name: str) -> bool:
    """Return whether the name of a directory is a valid queue name. Names of hidden files are not."""
    return _QUEUE.fullmatch(name) is not None


def is_existing_queue_name(name: str) -> bool:
    """Return whether a queue can have this name, also one that another program created."""
    if _QUEUE.fullmatch(name):
        return True
    # A separator, a control character or a byte that is not text is in none of these categories.
    return (
        name[:1].isalnum()
        and all(one in "._:-" or one.isalnum() or unicodedata.combining(one) for one in name)
        and len(name.encode()) <= _MOST_EXISTING
    )


def check_id(message_id: str) -> str:
    """Return `message_id` if it is a valid message id.

    Raises:
        InvalidName: It does not match `[A-Za-z0-9][A-Za-z0-9._:-]{0,119}`.
    """
    if not _ID.fullmatch(message_id):
        raise InvalidName(
            f"{printable(message_id)!r} is not a valid message id: use 1 to 120 of A-Z a-z 0-9 . _ : -"
            " and start with a letter or digit"
        )
    return message_id


def to_message_id(given: str) -> str:
    """Return the message id for an id that a publisher gives: any text of 1 byte or more.

    An id of at most 64 bytes that is a valid message id stays unchanged, and so does an id that qworker generated. Any
    other becomes `sha256-` and 52 characters.

    Raises:
        InvalidName: It is empty, or is not valid Unicode.
    """
    if _ID.fullmatch(given) and (len(given) <= _MOST_UNCHANGED or _GENERATED.fullmatch(given)):
        return given
    if not given:
        raise InvalidName("an id must have at least 1 byte (got 0)")
    try:
        digest = hashlib.sha256(given.encode()).digest()
    except UnicodeEncodeError:
        raise InvalidName(
            f"{printable(given)!r} is not a valid id: it has a lone surrogate: use text that UTF-8 can encode"
        ) from None
    return f"sha256-{base64.b32encode(digest).decode().rstrip('=').lower()}"


_CREATED = re.compile(r"unique-[0-9a-f]{32}")


def created_id() -> str:
    """Return a new id to give to a message whose id its publisher must know, such as one with a unique key.

    The id that `publish` returns shows whether the message was stored. A directory finds such an id without a listing,
    other than one that `new_id` returns.
    """
    return f"unique-{secrets.token_hex(16)}"


def is_created_id(message_id: str) -> bool:
    """Return whether an id is one that `created_id` returned."""
    return _CREATED.fullmatch(message_id) is not None


def failure_id_text(message_id: str) -> str:
    """Return the id that is given to the report of a message's failure."""
    return f"{message_id}:failed"


def failure_id(message_id: str) -> str:
    """Return the message id of the report of a message's failure. `requeue` frees its hold."""
    return to_message_id(failure_id_text(message_id))


def id_forms(given: str) -> tuple[str, ...]:
    """Return the message ids that a given id can have in a store, the usual one first.

    Older releases stored ids of up to 120 bytes unchanged, and other programs make ids of other forms.

    Raises:
        InvalidName: It is empty, or is not valid Unicode.
    """
    message_id = to_message_id(given)
    return (message_id,) if message_id == given else (message_id, given)


def forms_of_all(given: Iterable[str]) -> list[str]:
    """Return the message ids that some given ids can have in a store. A text that cannot be an id has none."""
    forms: list[str] = []
    for each in given:
        try:
            forms += id_forms(each)
        except InvalidName:
            pass
    return forms


# Bytes of the longest unique key.
MOST_KEY = 255


def check_key(key: str) -> str:
    """Return `key` if it is a valid unique key.

    Raises:
        InvalidName: It is empty or longer than 255 bytes, or has a lone surrogate.
    """
    try:
        size = len(key.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidName(
            f"{printable(key)!r} is not a valid unique key: it has a lone surrogate: use text that UTF-8 can encode"
        ) from None
    if not 0 < size <= MOST_KEY:
        raise InvalidName(f"a unique key must have 1 to {MOST_KEY} bytes (got {size})")
    return key


def counted(count: int, what: str) -> str:
    """Return a number with its noun, such as `1 message` or `2,000 messages`.

    Args:
        count: The number.
        what: The noun in the singular.
    """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def printable(text: str) -> str:
    """Return `text` without control characters and lone surrogates, for logs and terminals."""
    return _CONTROL.sub("?", text).encode(errors="replace").decode()


class _Identity:
    """The source of this process's ids. They contain a nonce, because containers can share process id and host name."""

    __slots__ = ("_last_ns", "_second", "_stamp", "pid", "suffix")

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40].strip(".-") or "host"
        self.pid = os.getpid()
        self.suffix = f"_{self.pid}_{host}-{secrets.token_hex(4)}"
        self._last_ns = 0
        self._second = -1
        self._stamp = ""

    def take(self, count: int) -> list[str]:
        # Ids rise strictly within the process, so that the messages of one publisher sort in the order of publishing.
        first = max(time.time_ns(), self._last_ns + 1)
        self._last_ns = first + count - 1
        ids: list[str] = []
        suffix = self.suffix
        for ns in range(first, first + count):
            second, rest = divmod(ns, 1_000_000_000)
            if second != self._second:
                self._second = second
                self._stamp = time.strftime("%Y%m%d%H%M%S", time.gmtime(second))
            ids.append(f"{self._stamp}_{rest:09d}{suffix}")
        return ids


_identity = _Identity()
os.register_at_fork(after_in_child=_identity.renew)


def new_ids(count: int) -> list[str]:
    """Return `count` new message ids, which are unique in the world and rise within this process.

    An id has the form `<UTC second>_<nanoseconds>_<pid>_<host-nonce>`, the first four fields of an fsq item's name. Ids
    sort by the time of their creation, and every native backend can keep them unchanged.
    """
    return _identity.take(count)


def new_id() -> str:
    """Return a new message id. See `new_ids`."""
    return _identity.take(1)[0]
