"""The options of a Redis URL. All connections get their options from here."""

from __future__ import annotations

import os
import re
import ssl
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from redis.credentials import CredentialProvider

from qworker.errors import InvalidURL
from qworker.history.store import HISTORY_OPTIONS, HistoryOptions
from qworker.kit.max_body import DEFAULT_MAX_BODY, MAX_BODY, max_body
from qworker.kit.retention import KEEP_ALL, KEEP_NONE, KEEP_OPTIONS, RetentionPolicy, keep_done, keep_failed
from qworker.url import BackendURL
from qworker_redis.credentials import credential_provider

__all__ = ["Address", "Options", "TcpAddress", "UnixAddress", "parse_hosts"]

_TLS_OPTIONS = ("tls_ca", "tls_cert", "tls_key", "tls_verify")
_OPTIONS: frozenset[str] = frozenset(
    {
        *_TLS_OPTIONS,
        "timeout",
        "retry_timeout",
        "min_replicas",
        "credential_provider",
        MAX_BODY,
        *KEEP_OPTIONS,
        *HISTORY_OPTIONS,
    }
)
# The options of `rfq:`. The other options do not fit the other implementations of its protocol.
_RFQ_OPTIONS: frozenset[str] = frozenset(
    {"timeout", "retry_timeout", "min_replicas", "credential_provider", "keep_failed", MAX_BODY, *HISTORY_OPTIONS}
)
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


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed Redis URL."""

    # single, sentinel or cluster.
    mode: str
    # The server, the sentinels, or some nodes of the cluster.
    addresses: tuple[Address, ...]
    # The name of the primary for the sentinels.
    primary: str = ""
    username: str | None = None
    password: str | None = None
    # Gives the user and the password of each new connection, in place of these two.
    credentials: CredentialProvider | None = None
    sentinel_password: str | None = None
    db: int = 0
    tls: ssl.SSLContext | None = None
    # Seconds for opening a connection, and for each answer.
    timeout: float = 5.0
    # Seconds for which a call that can be repeated is repeated before it fails.
    retry_timeout: float = 10.0
    # Replicas that must have a write before it counts.
    min_replicas: int = 0
    keep_done: RetentionPolicy = KEEP_NONE
    keep_failed: RetentionPolicy = KEEP_ALL
    # The largest body in bytes. None: any size.
    max_body: int | None = DEFAULT_MAX_BODY
    history: HistoryOptions = HistoryOptions(size=_HISTORY)
    # The URL, with its password hidden.
    shown: str = ""

    @classmethod
    def parse(cls, url: BackendURL) -> Options:
        """Parse a URL.

        Raises:
            InvalidURL: A part or an option is not valid. The error says what to write.
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
            raise InvalidURL(
                f"{url.masked}: only one host is possible: for several use redis+sentinel:// or redis+cluster://"
            )
        secure = secure or (mode != "single" and url.boolean("tls", False))
        if not secure:
            _no_tls(url)
        credentials = credential_provider(url)
        if credentials is not None and (username or password):
            raise InvalidURL(f"{url.masked}: remove the user and the password: the credential_provider gives them")
        return cls(
            mode=mode,
            addresses=addresses,
            primary=primary,
            username=username,
            password=password if password is not None else os.environ.get("QWORKER_REDIS_PASSWORD") or None,
            credentials=credentials,
            sentinel_password=os.environ.get("QWORKER_REDIS_SENTINEL_PASSWORD") or None,
            db=db,
            tls=_tls(url) if secure else None,
            timeout=url.duration("timeout", 5.0, least=0.05, most=3600.0),
            retry_timeout=url.duration("retry_timeout", 10.0, least=0.05, most=3600.0),
            min_replicas=url.integer("min_replicas", 0),
            keep_done=keep_done(url),
            keep_failed=keep_failed(url),
            max_body=max_body(url, None if url.scheme == "rfq" else DEFAULT_MAX_BODY),
            history=HistoryOptions.from_url(url, default=url.scheme != "rfq", size=_HISTORY),
            shown=url.masked,
        )


def _credentials(authority: str) -> tuple[str | None, str | None, str]:
    """Return the user, the password and the hosts of an authority."""
    login, at, hosts = authority.rpartition("@")
    if not at:
        return None, None, hosts
    username, colon, password = login.partition(":")
    return unquote(username) or None, unquote(password) if colon else None, hosts


def _default_host(url: BackendURL) -> str:
    """Return the host of a URL without one."""
    if url.scheme != "rfq":
        return "localhost"
    return f"{os.environ.get('RFQ_REDIS_HOST') or 'localhost'}:{os.environ.get('RFQ_REDIS_PORT') or 6379}"


def parse_hosts(text: str, port: int, url: BackendURL) -> tuple[TcpAddress, ...]:
    """Parse `host`, `host:port`, `[v6]`, `[v6]:port`, or several with commas between them.

    Raises:
        InvalidURL: One of them is not valid.
    """
    found: list[TcpAddress] = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.~%-]+)?)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", part)
        if match is None or not 0 < int(match[3] or port) < 65536:
            raise InvalidURL(
                f"{url.masked}: {part!r} is not a valid host: write host, host:port or [IPv6 address]:port"
            )
        found.append(TcpAddress(unquote(match[1] or match[2]), int(match[3] or port)))
    return tuple(found)


def _socket(url: BackendURL, hosts: str) -> UnixAddress:
    if hosts or not url.path:
        raise InvalidURL(f"{url.masked}: write unix:///path/of/the/socket, with ?db=1 for another database")
    return UnixAddress(os.path.abspath(url.path))


def _path(url: BackendURL, mode: str) -> tuple[str, int]:
    """Return the primary's name and the number of the database."""
    parts = url.path.strip("/").split("/") if url.path.strip("/") else []
    primary = ""
    if mode == "sentinel":
        if not parts:
            raise InvalidURL(f"{url.masked}: name the primary: redis+sentinel://host1,host2/mymaster")
        primary = parts.pop(0)
    if mode == "cluster" and parts not in ([], ["0"]):
        raise InvalidURL(f"{url.masked}: a cluster has only the database 0")
    if len(parts) > 1 or any(not (p.isascii() and p.isdigit() and len(p) < 10) for p in parts):
        raise InvalidURL(f"{url.masked}: the database must be a number: redis://host:6379/0")
    return primary, int(parts[0]) if parts else 0


def _no_tls(url: BackendURL) -> None:
    for name in _TLS_OPTIONS:
        if name in url.options:
            raise InvalidURL(f"{url.masked}: {name} is for TLS: use rediss:// (or ?tls=1 with sentinels and clusters)")


def _tls(url: BackendURL) -> ssl.SSLContext:
    """Return the context for TLS. It verifies the server unless the URL has `?tls_verify=0`."""
    verify = url.choice("tls_verify", "1", ("1", "0", "ca"))
    try:
        context = ssl.create_default_context(cafile=url.options.get("tls_ca"))
        if "tls_cert" in url.options:
            context.load_cert_chain(url.options["tls_cert"], url.options.get("tls_key"))
        elif "tls_key" in url.options:
            raise InvalidURL(f"{url.masked}: tls_key goes with tls_cert=FILE")
    except OSError as error:
        raise InvalidURL(f"{url.masked}: the TLS files cannot be read: {error}") from error
    if verify != "1":
        context.check_hostname = False
    if verify == "0":
        context.verify_mode = ssl.CERT_NONE
    return context
