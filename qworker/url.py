"""Backend URLs.

Directory schemes have the forms `scheme:///abs/dir`, and `scheme://./rel` or `scheme:./rel` relative to the working
directory. Servers have the form `scheme://user:password@host:port/db?option=value`. This module does not use `urlsplit`
of the standard library: some releases refuse lists of hosts with IPv6 addresses, and drop control characters silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
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
    """The parts of a backend URL.

    Attributes:
        scheme: The scheme, without the colon.
        authority: User, hosts and port of a server, percent-encoded: the text between `//` and the next `/` or `?`.
        path: The path, percent-decoded. For directory schemes see `directory`.
        options: The options after `?`.
        raw: The URL as given. It can hold a password, so never print it.
        credential_provider: Gives the user and the password of each new connection. See `Tasks`.
    """

    scheme: str
    authority: str
    path: str
    options: Mapping[str, str]
    raw: str
    credential_provider: Callable[[], Any] | None = None

    @classmethod
    def parse(cls, text: str) -> BackendURL:
        """Parse a URL.

        Raises:
            InvalidURL: The URL has no scheme, has control characters, or has an option twice.
        """
        if any(ord(c) < 0x20 or ord(c) == 0x7F for c in text):
            raise InvalidURL("a backend URL must not have control characters: check for a stray line end")
        scheme, colon, rest = text.partition(":")
        if not colon or not _SCHEME.fullmatch(scheme):
            raise InvalidURL(
                f"{mask(text)!r} is not a valid backend URL:"
                " write something like file:///var/spool/app or redis://localhost/0"
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
            InvalidURL: The URL has a host, or no directory.
            UsageError: The directory is relative, and the working directory was deleted.
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
        """Whether the directory is relative."""
        return self.authority in {".", ".."} or bool(not self.authority and self.path and self.path[0] != "/")

    def anchored(self, folder: Path) -> str:
        """Return the URL as text. A relative directory becomes an absolute path below `folder`."""
        if not self.is_relative:
            return self.raw
        _, mark, query = self.raw.partition("?")
        return f"{self.scheme}://{quote(str(folder / (self.authority + self.path)))}{mark}{query}"

    def with_options(self, **options: str) -> str:
        """Return the URL as text, with these options set."""
        query = urlencode({**self.options, **options}, quote_via=quote)
        return self.raw.partition("?")[0] + (f"?{query}" if query else "")

    @property
    def masked(self) -> str:
        """The URL with its password hidden."""
        return mask(self.raw)

    def at(self, directory: str) -> str:
        """Return the masked URL with this directory in place of its own, for messages and logs."""
        _, mark, query = self.masked.partition("?")
        return f"{self.scheme}://{directory}{mark}{query}"

    def only(self, known: Iterable[str]) -> None:
        """Refuse options that are not in `known`.

        Raises:
            InvalidURL: An option is not known. The text names it and the known ones.
        """
        known = sorted(known)
        if self.credential_provider is not None and "credential_provider" not in known:
            raise InvalidURL(f"{self.masked}: {self.scheme}: has no passwords: leave credential_provider out")
        for name in self.options:
            if name not in known:
                raise InvalidURL(f"{self.masked}: unknown option {name!r}: {_meant(name, known)}")

    def boolean(self, name: str, default: bool) -> bool:
        """Return the value of an option that is on or off.

        Raises:
            InvalidURL: The value is neither.
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
        """Return the value of an option that is a whole number.

        Raises:
            InvalidURL: The value is not a whole number, or is below `minimum`.
        """
        value = self.options.get(name)
        if value is None:
            return default
        if not value.isascii() or not value.isdigit() or int(value) < minimum:
            raise InvalidURL(f"{self.masked}: {name} must be a whole number of at least {minimum} (got {value!r})")
        return int(value)

    def duration(self, name: str, default: float, *, least: float = 0.0, most: float = LONGEST) -> float:
        """Return the value of an option that is a duration (`90`, `15m`, `2h`, `7d`), in seconds.

        Raises:
            InvalidURL: The value is not a duration, or is out of range.
        """
        value = self.options.get(name)
        if value is None:
            return default
        try:
            return parse_duration(value, least=least, most=most)
        except UsageError as error:
            raise InvalidURL(f"{self.masked}: {name}: {error}") from None

    def choice(self, name: str, default: str, choices: Iterable[str]) -> str:
        """Return the value of an option that is one of `choices`.

        Raises:
            InvalidURL: The value is not one of them.
        """
        value = self.options.get(name, default)
        choices = list(choices)
        if value not in choices:
            raise InvalidURL(f"{self.masked}: {name} must be one of {', '.join(choices)} (got {value!r})")
        return value


def working_directory() -> str:
    """Return the working directory.

    Raises:
        UsageError: The directory was deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working directory was deleted: change to one that exists") from None


def mask(text: str) -> str:
    """Return `text` with the passwords of URLs hidden."""
    return _PASSWORD.sub(r"\1***\2", text)


def _meant(name: str, known: list[str]) -> str:
    if not known:
        return "this URL takes no options"
    import difflib  # The import is slow, and only this text needs it.

    close = difflib.get_close_matches(name, known, 1)
    return f"{f'did you mean {close[0]!r}? ' if close else ''}Options: {', '.join(known)}"
