"""The error replies of Redis as errors of qworker."""

from __future__ import annotations

import re
from typing import Any, cast

from redis.exceptions import AskError, RedisError

from qworker.errors import (
    BackendError,
    BackendUnavailable,
    FormatTooNew,
    PermissionDenied,
    QueueDamaged,
    StorageFull,
)
from qworker_redis.options import TcpAddress

__all__ = ["ConnectionLost", "NoScript", "Redirected", "Reply", "to_error"]

# The answer to a command: text, a number, nothing, an error, or a list of these.
Reply = object

# The server runs, but cannot serve now: repeat the command later.
_LATER = frozenset({"LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"})
_CHECK = "check QWORKER_REDIS_PASSWORD, and the user and password of the URL"
_NO_DATABASE = re.compile(r"ERR (?:invalid )?DB index")
_FULL = frozenset({"OOM", "MISCONF"})


class ConnectionLost(BackendUnavailable):
    """The connection was lost. `sent`: the command may have been carried out."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class Redirected(BackendUnavailable):
    """Another server has this key now: `MOVED`, `ASK`, or `READONLY` from a server that is not the primary any more.

    Attributes:
        code: One of these words.
        slot: The slot of the key. -1 with `READONLY`.
        target: The server that has the slot, or gets it. Without a host, it is the one that answered. None with
            `READONLY`.
    """

    def __init__(self, text: str, code: str, *, slot: int = -1, target: TcpAddress | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.slot = slot
        self.target = target


class NoScript(BackendError):
    """The server does not know a script, because it was restarted or its scripts were flushed."""


# Before Redis 7, the error of a command is inside the error of its script.
_IN_SCRIPT = re.compile(r"ERR Error running script .*@user_script: ?\d+: -?([A-Z]+ .*)", re.DOTALL)


def to_error(error: RedisError) -> BackendError:
    """Make the error for an error reply, with one line of text and the reply as its cause."""
    # redis-py takes the codes that it knows out of the text.
    text = str(error) if error.status_code is None else f"{error.status_code} {error}"
    if (inside := _IN_SCRIPT.match(text)) is not None:
        text = inside[1]
    code, _, rest = text.partition(" ")
    found: BackendError
    if isinstance(error, AskError):
        host, port = cast("tuple[str, int]", cast("Any", error).node_addr)
        target = TcpAddress(host.strip("[]"), port)
        found = Redirected(text, code, slot=error.slot_id, target=target)
    elif code == "READONLY":
        found = Redirected(text, code)
    elif code in _LATER or text.startswith("ERR max number of clients"):
        found = BackendUnavailable(f"Redis cannot serve now: {text}")
    elif (refusal := _refusal(code, text)) is not None:
        found = PermissionDenied(refusal)
    elif code in _FULL:
        found = StorageFull(f"Redis refuses more data: {text}: raise maxmemory or free disk space; workers continue")
    elif code == "NOSCRIPT":
        found = NoScript(text)
    elif code == "QWTOONEW":
        found = FormatTooNew(f"{rest}, but this release reads only 1: upgrade qworker")
    elif code == "WRONGTYPE":
        found = QueueDamaged(f"a key has another type: {text}: run `qworker doctor`")
    else:
        found = BackendError(f"Redis: {text}")
    found.__cause__ = error
    return found


def _refusal(code: str, text: str) -> str | None:
    """Say what is wrong and what to do if the server refuses a user or a database. Otherwise return None."""
    if code == "NOAUTH":
        return "Redis asks for a password: set QWORKER_REDIS_PASSWORD, or put it into the URL"
    if code == "WRONGPASS":
        return f"Redis refuses the user or the password: {_CHECK}"
    if code == "NOPERM" or text.startswith("ERR AUTH"):
        return f"Redis refuses this user: {text}: {_CHECK}"
    if _NO_DATABASE.match(text):
        return "Redis has no database of this number: use a lower one, or raise `databases` in redis.conf"
    return None
