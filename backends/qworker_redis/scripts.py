"""The Lua scripts: one per transition, read from `lua/`, with the keys that each of them names in its header.

Each protocol has a set of them and keys of its own; those that both have take the same arguments and answer alike.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files

__all__ = ["NATIVE", "SCRIPTS", "Script", "ScriptSet", "queue_key", "script"]

_KEYS = re.compile(r"^-- KEYS: (.+)$", re.MULTILINE)

# Scripts that do without what the others share, whose making takes as long as a call or two.
_ALONE = frozenset({"publish_one"})

# Scripts that give pages of a state, which have lua/order.lua too.
_ORDERED = frozenset({"look"})

# Scripts, and whether Redis may refuse them when its memory is full: whatever only drains must go on.
_DENIED_WHEN_FULL = frozenset({"publish", "publish_one", "publish_staged", "stage"})

SCRIPTS = (
    "create",
    "discard",
    "extend",
    "finish",
    "giveback",
    "hold",
    "lease",
    "look",
    "peek",
    "publish",
    "publish_one",
    "publish_staged",
    "reap",
    "remove",
    "requeue",
    "seal",
    "settle",
    "stage",
    "stats",
)


class Script:
    """One script, as sent to a server of some version."""

    __slots__ = ("keys", "name", "sha", "source")

    def __init__(self, name: str, common: str, text: str, *, flags: bool) -> None:
        found = _KEYS.search(text)
        if found is None:
            raise AssertionError(f"lua/{name}.lua names no KEYS")
        first = ""
        if flags:
            first = "#!lua\n" if name in _DENIED_WHEN_FULL else "#!lua flags=allow-oom\n"
        self.name = name
        self.keys = tuple(found[1].split())
        body = text if name in _ALONE else f"{common}\n{text}"
        self.source = f"{first}{body}".encode()
        # Redis names scripts by this digest; nothing is secured by it.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class ScriptSet:
    """The scripts of one protocol, and its names of keys.

    Args:
        folder: of this package, where they are in `lua/`; empty: the package itself.
        key: the key of a queue's part, as the headers name it.
        names: all of them.
    """

    def __init__(self, folder: str, key: Callable[[str, str], bytes], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._folder = files("qworker_redis").joinpath(*([folder] if folder else []), "lua")
        self.key = key
        self.get = cache(self._read)

    def _read(self, name: str, *, flags: bool) -> Script:
        common, text = ((self._folder / f"{part}.lua").read_text("utf-8") for part in ("common", name))
        if name in _ORDERED:
            common += files("qworker_redis").joinpath("lua", "order.lua").read_text("utf-8")
        return Script(name, common, text, flags=flags)


def queue_key(queue: str, part: str) -> bytes:
    """A key of a queue. The braces put all keys of a queue into one slot of a cluster."""
    return f"{{qworker:{queue}}}:{part}".encode()


NATIVE = ScriptSet("", queue_key, SCRIPTS)


def script(name: str, *, flags: bool) -> Script:
    """A script of the native protocol by its name; `flags`: the server is Redis 7 or newer, and knows script flags."""
    return NATIVE.get(name, flags=flags)
