"""The Lua scripts: one per transition, read from `lua/`, with the keys that each of them names in its header.

Each protocol has its own scripts and keys. A script that both have takes the same arguments and has the same kind of
answer. `lua/shared.lua` contains the functions that the scripts of both protocols share, and `common.lua` those of one
protocol.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

__all__ = ["ScriptSet"]

_KEYS = re.compile(r"^-- KEYS: (.+)$", re.MULTILINE)
_COMMENT = re.compile(r"--.*")
# Parts of a file of shared functions, and the names that a part defines.
_PARTS = re.compile(r"\n\n(?=\S)")
_DEFINED = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)

# Scripts that Redis may refuse when its memory is full. Scripts that only drain queues must continue.
_DENIED_WHEN_FULL = frozenset({"publish", "publish_one", "publish_staged", "stage"})


class Script:
    """One script, as sent to a server of some version."""

    __slots__ = ("keys", "name", "sha", "source")

    def __init__(self, name: str, shared: str, text: str, *, flags: bool) -> None:
        found = _KEYS.search(text)
        if found is None:
            raise AssertionError(f"lua/{name}.lua names no KEYS")
        first = ""
        if flags:
            first = "#!lua\n" if name in _DENIED_WHEN_FULL else "#!lua flags=allow-oom\n"
        self.name = name
        self.keys = tuple(found[1].split())
        self.source = f"{first}{_with_used(shared, text)}".encode()
        # Redis names scripts by this digest. It has no security purpose.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


def _with_used(shared: str, text: str) -> str:
    """Put the shared parts that a script uses in front of it. The server makes each function again in every call."""
    for part in reversed(_PARTS.split(shared)):
        code = _COMMENT.sub("", text)
        if any(re.search(rf"\b{name}\b", code) for name in _DEFINED.findall(part)):
            text = f"{part}\n\n{text}"
    return text


class ScriptSet:
    """The scripts of one protocol, and its names of keys.

    Args:
        folder: The folder of this package that contains them in `lua/`. Empty: the package itself.
        key: Returns the key of a queue's part, as the headers name it.
        types: The type of each part of a queue.
        shared: Keys that belong to no queue, and their types.

    Attributes:
        types: The types of the parts.
        shared: The shared keys.
    """

    def __init__(
        self, folder: str, key: Callable[[str, str], bytes], types: Mapping[str, str], shared: Mapping[bytes, str] = {}
    ) -> None:
        package = files("qworker_redis")
        self._folder = package.joinpath(*([folder] if folder else []), "lua")
        self._shared = package / "lua" / "shared.lua"
        self.key = key
        self.types = types
        self.shared = shared
        self.get = cache(self._read)

    def names(self) -> list[str]:
        """Return the names of all scripts."""
        names = {path.name.removesuffix(".lua") for path in self._folder.iterdir()}
        return sorted(names - {"shared", "common"})

    def _read(self, name: str, *, flags: bool) -> Script:
        paths = self._shared, self._folder / "common.lua", self._folder / f"{name}.lua"
        shared, common, text = (path.read_text("utf-8") for path in paths)
        return Script(name, f"{shared}\n{common}", text, flags=flags)
