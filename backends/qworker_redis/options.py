"""What a Redis URL says, and how to reach each server it leads to: the one place where connections get their options."""

from __future__ import annotations

import os
import re
import ssl
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from qworker.errors import InvalidURL
from qworker.history.store import HISTORY_OPTIONS, HistoryOptions
from qworker.url import BackendURL

__all__ = ["Address", "Mode", "Options", "TcpAddress", "UnixAddress", "parse_hosts"]

_OPTIONS: frozenset[str] = frozenset(
    {"ca", "cert", "key", "verify", "timeout", "patience", "replicas", "keep_done", "keep_fail", *HISTORY_OPTIONS}
)
# Of the protocol that leaves the rest to its other implementations.
_RFQ_OPTIONS: frozenset[str] = frozenset({"timeout", "patience", "replicas", "keep_fail", *HISTORY_OPTIONS})
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DEFAULT_DONE_AGE = 7 * 86400.0
# Bytes of a queue's stream of events.
_HISTORY = 32 << 20


class TcpAddress(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UnixAddress(NamedTuple):
    """A socket in the file system."""

    path: str

    def __str__(self) -> str:
        return self.path


Address = TcpAddress | UnixAddress

Mode = str


class Retention(msgspec.Struct, frozen=True):
    """How long finished messages are kept."""

    keep: bool = False
    # Seconds; None: for ever.
    age: float | None = None
    # How many; None: any number.
    count: int | None = None

    def describe(self) -> str:
        """In words."""
        if not self.keep:
            return "not kept"
        if self.count is not None:
            return f"the last {self.count}"
        return "for ever" if self.age is None else _duration(self.age)


def _duration(seconds: float) -> str:
    """In the largest unit that needs no fraction."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis URL, understood."""

    # single, sentinel or cluster.
    mode: Mode
    # The server, the sentinels, or some nodes of the cluster.
    addresses: tuple[Address, ...]
    # The name that the sentinels know the primary by.
    primary: str = ""
    username: str | None = None
    password: str | None = None
    sentinel_password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None
    # Seconds for a connection to be made, and for each answer.
    timeout: float = 5.0
    # Seconds for which a call that can be repeated is repeated before it fails.
    patience: float = 10.0
    # Replicas that must have a write before it counts.
    replicas: int = 0
    done: Retention = Retention()
    fail: Retention = Retention(keep=True)
    history: HistoryOptions = HistoryOptions(size=_HISTORY)
    # The URL, with its password hidden.
    shown: str = ""

    @classmethod
    def parse(cls, url: BackendURL) -> Options:
        """Understand a URL.

        Raises:
            InvalidURL: a part or an option that no Redis URL has; says what to write.
        """
        unix = url.scheme == "unix"
        mode = {"redis+sentinel": "sentinel", "redis+cluster": "cluster"}.get(url.scheme, "single")
        secure = url.scheme == "rediss"
        known = _RFQ_OPTIONS if url.scheme == "rfq" else _OPTIONS
        url.only([*known, *(["db"] if unix else []), *(["tls"] if mode != "single" else [])])
        username, password, hosts = _credentials(url.authority)
        primary, db = "", 0
        addresses: tuple[Address, ...]
        if unix:
            addresses, db = (_socket(url, hosts),), url.integer("db", 0)
        else:
            addresses = parse_hosts(hosts or _default_host(url), 26379 if mode == "sentinel" else 6379, url)
            primary, db = _path(url, mode)
        if mode == "single" and len(addresses) > 1:
            raise InvalidURL(f"{url.masked}: one host only; several are redis+sentinel:// or redis+cluster://")
        secure = secure or (mode != "single" and url.boolean("tls", False))
        if not secure:
            _no_tls(url)
        return cls(
            mode=mode,
            addresses=addresses,
            primary=primary,
            username=username,
            password=password if password is not None else os.environ.get("QWORKER_REDIS_PASSWORD") or None,
            sentinel_password=os.environ.get("QWORKER_REDIS_SENTINEL_PASSWORD") or None,
            db=db,
            tls=_tls(url) if secure else None,
            timeout=url.duration("timeout", 5.0, least=0.05, most=3600.0),
            patience=url.duration("patience", 10.0, least=0.05, most=3600.0),
            replicas=url.integer("replicas", 0),
            done=_retention(url, "keep_done", Retention(), Retention(keep=True, age=_DEFAULT_DONE_AGE)),
            fail=_fail_retention(url),
            history=HistoryOptions.from_url(url, default=url.scheme != "rfq", size=_HISTORY),
            shown=url.masked,
        )


def _credentials(authority: str) -> tuple[str | None, str | None, str]:
    """The user, the password and the hosts of an authority."""
    login, at, hosts = authority.rpartition("@")
    if not at:
        return None, None, hosts
    username, colon, password = login.partition(":")
    return unquote(username) or None, unquote(password) if colon else None, hosts


def _default_host(url: BackendURL) -> str:
    """Where a URL without a host leads to."""
    if url.scheme != "rfq":
        return "localhost"
    return f"{os.environ.get('RFQ_REDIS_HOST') or 'localhost'}:{os.environ.get('RFQ_REDIS_PORT') or 6379}"


def parse_hosts(text: str, port: int, url: BackendURL) -> tuple[TcpAddress, ...]:
    """`host`, `host:port`, `[v6]`, `[v6]:port`, or several with commas between them.

    Raises:
        InvalidURL: one of them is none of these.
    """
    found: list[TcpAddress] = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.~%-]+)?)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", part)
        if match is None or not 0 < int(match[3] or port) < 65536:
            raise InvalidURL(f"{url.masked}: {part!r} is no host: write host, host:port or [IPv6 address]:port")
        found.append(TcpAddress(unquote(match[1] or match[2]), int(match[3] or port)))
    return tuple(found)


def _socket(url: BackendURL, hosts: str) -> UnixAddress:
    if hosts or not url.path:
        raise InvalidURL(f"{url.masked}: write unix:///path/of/the/socket, with ?db=1 for another database")
    return UnixAddress(os.path.abspath(url.path))


def _path(url: BackendURL, mode: str) -> tuple[str, int]:
    """The primary's name and the number of the database."""
    parts = url.path.strip("/").split("/") if url.path.strip("/") else []
    primary = ""
    if mode == "sentinel":
        if not parts:
            raise InvalidURL(f"{url.masked}: name the primary: redis+sentinel://host1,host2/mymaster")
        primary = parts.pop(0)
    if mode == "cluster" and parts not in ([], ["0"]):
        raise InvalidURL(f"{url.masked}: a cluster has the database 0 only")
    if len(parts) > 1 or any(not (p.isascii() and p.isdigit() and len(p) < 10) for p in parts):
        raise InvalidURL(f"{url.masked}: the database is a number: redis://host:6379/0")
    return primary, int(parts[0]) if parts else 0


def _retention(url: BackendURL, name: str, default: Retention, on: Retention) -> Retention:
    """`0`, `1`, an age like `7d`, or a number of messages."""
    value = url.options.get(name)
    if value is None:
        return default
    if value in {"0", "1"}:
        return on if value == "1" else Retention()
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", value)
    if match is None or int(match[1]) == 0:
        raise InvalidURL(f"{url.masked}: {name} is 0, 1, an age like 7d or 12h, or a number of messages, not {value!r}")
    if match[2]:
        return Retention(keep=True, age=float(int(match[1]) * _UNITS[match[2]]))
    return Retention(keep=True, count=int(match[1]))


def _fail_retention(url: BackendURL) -> Retention:
    """For ever, or an age: a failure that is counted out unseen helps nobody."""
    found = _retention(url, "keep_fail", Retention(keep=True), Retention(keep=True))
    if not found.keep or found.count is not None:
        raise InvalidURL(
            f"{url.masked}: keep_fail is 1 (for ever) or an age like 30d, not {url.options['keep_fail']!r}"
        )
    return found


def _no_tls(url: BackendURL) -> None:
    for name in ("ca", "cert", "key", "verify"):
        if name in url.options:
            raise InvalidURL(f"{url.masked}: {name} is for TLS: use rediss:// (or ?tls=1 with sentinels and clusters)")


def _tls(url: BackendURL) -> ssl.SSLContext:
    """Verified TLS, unless `?verify=0` says otherwise."""
    verify = url.choice("verify", "1", ("1", "0", "ca"))
    try:
        context = ssl.create_default_context(cafile=url.options.get("ca"))
        if "cert" in url.options:
            context.load_cert_chain(url.options["cert"], url.options.get("key"))
        elif "key" in url.options:
            raise InvalidURL(f"{url.masked}: key goes with cert=FILE")
    except OSError as error:
        raise InvalidURL(f"{url.masked}: the TLS files cannot be read: {error}") from error
    if verify != "1":
        context.check_hostname = False
    if verify == "0":
        context.verify_mode = ssl.CERT_NONE
    return context
