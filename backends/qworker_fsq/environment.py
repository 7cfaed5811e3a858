"""The constants of fsq(7), each of which an environment variable sets: `FSQ_ROOT`, `FSQ_MAX_TRIES`, ..."""

from __future__ import annotations

import codecs
import grp
import os
import pwd
from collections.abc import Mapping

import msgspec

from qworker.duration import parse_duration
from qworker.errors import UsageError

__all__ = ["NO_LIMITS", "Constants", "ItemLimits", "group_id", "user_id"]

_WORDS = ("root", "timefmt", "charset")
_FILES = ("queue", "done", "fail", "tmp", "down", "trigger", "hosts", "hosts_trigger")
_OWNERS = ("item_user", "item_group", "queue_user", "queue_group")
_MODES = ("item_mode", "queue_mode")
_NUMBERS = ("fail_tmp", "fail_perm", "success", "max_tries")
_FLAGS = ("use_trigger", "lock")


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """The values that the environment can set for every program of the standard. The defaults are the standard's."""

    root: str = "/var/fsq"
    # Names of the parts of a queue.
    queue: str = "queue"
    done: str = "done"
    fail: str = "fail"
    tmp: str = "tmp"
    down: str = "down"
    trigger: str = "trigger-s"
    hosts: str = "hosts"
    hosts_trigger: str = "hosts-trigger-s"
    # The notation of names.
    delimiter: str = "_"
    encode: str = "%"
    charset: str = "utf8"
    timefmt: str = "%Y%m%d%H%M%S"
    # Owners, by name or number; None: the user that creates the file.
    item_user: str | None = None
    item_group: str | None = None
    queue_user: str | None = None
    queue_group: str | None = None
    item_mode: int = 0o640
    queue_mode: int = 0o2770
    # Exit statuses of programs that work on items.
    success: int = 0
    fail_tmp: int = 111
    fail_perm: int = 100
    # Whether install makes triggers.
    use_trigger: bool = False
    lock: bool = True
    # 0: any number; None: not set. Then a scan takes 1, and a worker the limit of its tasks.
    max_tries: int | None = None
    # Seconds; 0: for ever.
    ttl: float = 0.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Constants:
        """Read `FSQ_*`.

        Raises:
            UsageError: One of them is not valid.
        """
        given = {
            name: environment[f"FSQ_{name.upper()}"]
            for name in cls.__struct_fields__
            if f"FSQ_{name.upper()}" in environment
        }
        return cls().changed(**given)

    def changed(self, **given: str) -> Constants:
        """Return a copy with some values changed, given as in the environment.

        Raises:
            UsageError: One of them is not valid.
        """
        values = {
            name: _parse_duration(name, text) if name == "ttl" else _value(name, text) for name, text in given.items()
        }
        made = msgspec.structs.replace(self, **values)
        if made.delimiter == made.encode:
            raise UsageError(f"FSQ_DELIMITER and FSQ_ENCODE are both {made.encode!r}: choose two characters")
        if made.delimiter == ".":
            raise UsageError("FSQ_DELIMITER=. would hide every item: choose another character")
        return made

    @property
    def is_usual(self) -> bool:
        """True if names have the standard's usual notation."""
        return self.encode == "%" and self.timefmt == "%Y%m%d%H%M%S" and self.charset == "utf8"

    @property
    def scan_max_tries(self) -> int:
        """`FSQ_MAX_TRIES` with the standard's default."""
        return 1 if self.max_tries is None else self.max_tries


class ItemLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits after which an item has failed, from `FSQ_MAX_TRIES` and `FSQ_TTL`.

    Attributes:
        max_tries: The number of failed attempts; 0: any number.
        ttl: Seconds since it was enqueued; 0: any time.
        keep_done: Whether finished items are kept.
    """

    max_tries: int = 0
    ttl: float = 0.0
    keep_done: bool = True

    def why_exhausted(self, tries: int, enqueued_at: float, now: float) -> str | None:
        """Return why an item must not run any more, or None if it can run."""
        if 0 < self.max_tries <= tries:
            return f"Max tries exceeded: {self.max_tries} ({tries})"
        if self.ttl > 0 and now > enqueued_at + self.ttl:
            return f"TTL Expired: {self.ttl:.10g}"
        return None


NO_LIMITS = ItemLimits()


def _parse_duration(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except UsageError as error:
        raise UsageError(f"FSQ_{name.upper()}: {error}") from None


def _value(name: str, text: str) -> str | int | bool | None:
    variable = f"FSQ_{name.upper()}"
    if name in _NUMBERS or name in _FLAGS:
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            raise UsageError(f"{variable} must be a number (got {text!r})")
        return int(text) if name in _NUMBERS else int(text) != 0
    if name in _MODES:
        return _mode(variable, text)
    if name in _OWNERS:
        return text or None
    if name in _FILES:
        if not text or text in {".", ".."} or "/" in text:
            raise UsageError(f"{variable} must be the name of a file (got {text!r})")
        return text
    if name in _WORDS:
        return _word(variable, text)
    if len(text) != 1 or not text.isascii() or not text.isprintable() or text == "/":
        raise UsageError(f"{variable} must be one ASCII character other than / (got {text!r})")
    return text


def _mode(variable: str, text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise UsageError(f"{variable} must be an octal mode such as 00640 (got {text!r})")
    return mode


def _word(variable: str, text: str) -> str:
    if not text:
        raise UsageError(f"{variable} is empty: set it or unset it")
    if variable == "FSQ_CHARSET":
        try:
            codecs.lookup(text)
        except LookupError:
            raise UsageError(f"FSQ_CHARSET: {text!r} is not a character set") from None
    return text


def user_id(user: str | None) -> int:
    """Return the number of a user given by name or number; -1, which changes nothing, for None.

    Raises:
        UsageError: The user does not exist.
    """
    if user is None:
        return -1
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageError(f"unknown user {user!r}") from None


def group_id(group: str | None) -> int:
    """Return the number of a group given by name or number; -1, which changes nothing, for None.

    Raises:
        UsageError: The group does not exist.
    """
    if group is None:
        return -1
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(f"unknown group {group!r}") from None
