"""Backend URLs, read in one place.

`scheme:///abs/dir`, and `scheme://./rel` or `scheme:./rel` relative to the working directory, for directory schemes;
`scheme://user:password@host:port/db?option=value` for servers. Split by hand: the standard library's `urlsplit` refuses lists of
hosts with IPv6 addresses in some releases, and drops control characters silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode

import msgspec

from qworker.duration import LONGEST, parse_duration
from qworker.errors import InvalidURL, UsageError

__all__ = ["BackendURL", "mask", "working_directory"]

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_PASSWORD = re.compile(r"(//[^/?#@]*?:)[^/?#]*(@)")


class BackendURL(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a backend URL."""

    scheme: str
    # Between `//` and the next `/` or `?`, still percent-encoded: user, hosts and port of servers.
    authority: str
    # Percent-decoded; for directory schemes see `directory`.
    path: str
    options: Mapping[str, str]
    # As given: holds the password, so never print it.
    raw: str

    @classmethod
    def parse(cls, text: str) -> BackendURL:
        """Split `text`.

        Raises:
            InvalidURL: it has no scheme, holds control characters, or names an option twice.
        """
        if any(ord(c) < 0x20 or ord(c) == 0x7F for c in text):
            raise InvalidURL("a backend URL must not have control characters: check for a stray line end")
        scheme, colon, rest = text.partition(":")
        if not colon or not _SCHEME.fullmatch(scheme):
            raise InvalidURL(
                f"{mask(text)!r} is not a valid backend URL: write something like file:///var/spool/app or redis://localhost/0"
            )
        rest, _, query = rest.partition("?")
        authority = ""
        if rest.startswith("//"):
            authority, slash, path = rest[2:].partition("/")
            path = slash + path
        else:
            path = rest
        options: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name in options:
                raise InvalidURL(f"the option {name!r} is given twice in {mask(text)}: keep one")
            options[name] = value
        return cls(scheme=scheme, authority=authority, path=unquote(path), options=options, raw=text)

    @property
    def directory(self) -> Path:
        """The absolute directory of a directory scheme.

        Raises:
            InvalidURL: it names a host or no directory.
            UsageError: it is relative to a working directory that does not exist any more.
        """
        if self.authority in {".", ".."}:
            named = self.authority + self.path
        elif self.authority:
            host = mask(f"//{self.authority}")[2:]
            raise InvalidURL(
                f"{mask(self.raw)}: {host!r} would be a host name: write {self.scheme}:///{host}{self.path}"
                f" or {self.scheme}://./{host}{self.path}"
            )
        else:
            named = self.path
        if not named:
            raise InvalidURL(
                f"{mask(self.raw)} does not name a directory: write {self.scheme}:///abs/dir or {self.scheme}://./rel"
            )
        return Path(working_directory(), named) if self.is_relative else Path(named)

    @property
    def is_relative(self) -> bool:
        """Whether it names a directory relative to another one."""
        return self.authority in {".", ".."} or bool(not self.authority and self.path and self.path[0] != "/")

    def anchored(self, folder: Path) -> str:
        """The URL as text; that of a relative directory with its whole path, below `folder`."""
        if not self.is_relative:
            return self.raw
        _, mark, query = self.raw.partition("?")
        return f"{self.scheme}://{quote(str(folder / (self.authority + self.path)))}{mark}{query}"

    def with_options(self, **options: str) -> str:
        """The URL as text, with these options set."""
        query = urlencode({**self.options, **options}, quote_via=quote)
        return self.raw.partition("?")[0] + (f"?{query}" if query else "")

    @property
    def masked(self) -> str:
        """The URL with its password hidden."""
        return mask(self.raw)

    def at(self, directory: str) -> str:
        """The URL with the whole path of its directory, for people and logs."""
        _, mark, query = self.masked.partition("?")
        return f"{self.scheme}://{directory}{mark}{query}"

    def only(self, known: Iterable[str]) -> None:
        """Refuse options that are not in `known`.

        Raises:
            InvalidURL: names the first unknown one and all known ones.
        """
        known = sorted(known)
        for name in self.options:
            if name not in known:
                raise InvalidURL(f"{self.masked}: unknown option {name!r}: {_meant(name, known)}")

    def boolean(self, name: str, default: bool) -> bool:
        """An option that is on or off.

        Raises:
            InvalidURL: it is neither.
        """
        value = self.options.get(name)
        if value is None:
            return default
        if value.lower() in _TRUE:
            return True
        if value.lower() in _FALSE:
            return False
        raise InvalidURL(f"{self.masked}: {name} must be 1 or 0 (got {value!r})")

    def integer(self, name: str, default: int, *, minimum: int = 0) -> int:
        """A whole number.

        Raises:
            InvalidURL: it is none, or below `minimum`.
        """
        value = self.options.get(name)
        if value is None:
            return default
        if not value.isascii() or not value.isdigit() or int(value) < minimum:
            raise InvalidURL(f"{self.masked}: {name} must be a whole number of at least {minimum} (got {value!r})")
        return int(value)

    def duration(self, name: str, default: float, *, least: float = 0.0, most: float = LONGEST) -> float:
        """A time span in seconds, such as `90`, `15m`, `2h` or `7d`.

        Raises:
            InvalidURL: It is not a duration, or it is out of range.
        """
        value = self.options.get(name)
        if value is None:
            return default
        try:
            return parse_duration(value, least=least, most=most)
        except UsageError as error:
            raise InvalidURL(f"{self.masked}: {name}: {error}") from None

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """One of several words.

        Raises:
            InvalidURL: it is none of them.
        """
        value = self.options.get(name, default)
        choices = list(choices)
        if value not in choices:
            raise InvalidURL(f"{self.masked}: {name} must be one of {', '.join(choices)} (got {value!r})")
        return value


def working_directory() -> str:
    """The working directory.

    Raises:
        UsageError: it does not exist any more.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted: change to one that exists") from None


def mask(text: str) -> str:
    """`text` with the password of a URL hidden."""
    return _PASSWORD.sub(r"\1***\2", text)


def _meant(name: str, known: list[str]) -> str:
    if not known:
        return "this URL takes no options"
    import difflib  # only for this text

    close = difflib.get_close_matches(name, known, 1)
    return f"{f'did you mean {close[0]!r}? ' if close else ''}Options: {', '.join(known)}"
