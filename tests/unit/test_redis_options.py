"""What Redis URLs say."""

from __future__ import annotations

import pytest

from qworker.backend.registry import open_backend
from qworker.backend.store_rules import StoreRules
from qworker.errors import InvalidURL, NotSupported
from qworker.message import Draft
from qworker.unique import Unique
from qworker.url import BackendURL
from qworker_redis.options import Options, TcpAddress, UnixAddress


def parsed(url: str) -> Options:
    return Options.parse(BackendURL.parse(url))


@pytest.fixture(autouse=True)
def _no_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWORKER_REDIS_PASSWORD", raising=False)
    monkeypatch.delenv("QWORKER_REDIS_SENTINEL_PASSWORD", raising=False)


@pytest.mark.parametrize(
    ("url", "addresses", "db"),
    [
        ("redis://", (TcpAddress("localhost", 6379),), 0),
        ("redis://example.org", (TcpAddress("example.org", 6379),), 0),
        ("redis://example.org:7000/3", (TcpAddress("example.org", 7000),), 3),
        ("redis://[::1]:7000/", (TcpAddress("::1", 7000),), 0),
        ("redis://[fe80::1%25eth0]", (TcpAddress("fe80::1%eth0", 6379),), 0),
        ("unix:///run/redis.sock", (UnixAddress("/run/redis.sock"),), 0),
        ("unix:///run/redis.sock?db=2", (UnixAddress("/run/redis.sock"),), 2),
        ("redis+sentinel://a,[::2]:7,c:8/main/4", (("a", 26379), ("::2", 7), ("c", 8)), 4),
        ("redis+cluster://a:1,b", (("a", 1), ("b", 6379)), 0),
    ],
)
def test_addresses(url: str, addresses: tuple[object, ...], db: int) -> None:
    options = parsed(url)
    assert (options.addresses, options.db) == (addresses, db)


def test_the_primary_of_sentinels_is_named() -> None:
    assert parsed("redis+sentinel://a/main").primary == "main"


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("redis://host", (None, None)),
        ("redis://user@host", ("user", None)),
        ("redis://:secret@host", (None, "secret")),
        ("redis://user:p%40ss%2Fword@host", ("user", "p@ss/word")),
        ("redis://user:p@ss@host", ("user", "p@ss")),
        ("unix://user:secret@/run/redis.sock", ("user", "secret")),
    ],
)
def test_logins(url: str, login: tuple[str | None, str | None]) -> None:
    options = parsed(url)
    assert (options.username, options.password) == login
    if login[1]:
        assert login[1] not in options.shown


def test_passwords_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWORKER_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("QWORKER_REDIS_SENTINEL_PASSWORD", "other")
    assert parsed("redis://host").password == "secret"
    assert parsed("redis://:own@host").password == "own"
    assert parsed("redis+sentinel://host/main").sentinel_password == "other"


def test_tls_verifies_unless_told_otherwise() -> None:
    assert parsed("redis://host").tls is None
    for url in ("rediss://host", "redis+cluster://host?tls=1"):
        context = parsed(url).tls
        assert context is not None
        assert context.check_hostname
    relaxed = parsed("rediss://host?tls_verify=ca").tls
    assert relaxed is not None
    assert (relaxed.check_hostname, relaxed.verify_mode.name) == (False, "CERT_REQUIRED")
    blind = parsed("rediss://host?tls_verify=0").tls
    assert blind is not None
    assert blind.verify_mode.name == "CERT_NONE"


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("redis://host:0", "is not a valid host"),
        ("redis://host:70000", "is not a valid host"),
        ("redis://ho st", "is not a valid host"),
        ("redis://a,b", "redis+cluster"),
        ("redis://host/main", "database must be a number"),
        ("redis://host/1/2", "database must be a number"),
        ("redis://host?colour=red", "unknown option"),
        ("redis://host?tls_ca=/x", "rediss://"),
        ("redis://host?timeout=soon", "seconds"),
        ("redis://host?timeout=nan", "seconds"),
        ("redis://host?retry_timeout=-1", "seconds"),
        ("rediss://host?tls_ca=/does/not/exist", "cannot be read"),
        ("rediss://host?tls_key=/x", "cert=FILE"),
        ("unix://host/x", "unix:///path"),
        ("unix:", "unix:///path"),
        ("redis+sentinel://host", "name the primary"),
        ("redis+cluster://host/1", "database 0"),
    ],
)
def test_a_wrong_url_says_what_to_write(url: str, fix: str) -> None:
    with pytest.raises(InvalidURL, match=fix.replace("+", r"\+")) as caught:
        parsed(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster"])
def test_every_scheme_is_registered(scheme: str) -> None:
    backend = open_backend(f"{scheme}://user:secret@host")
    assert backend.describe() == f"{scheme}://user:***@host"


def test_an_instance_for_a_cluster_has_the_deviations_of_clusters() -> None:
    # A server in front of it reports them, and a call that is sent later is checked by them.
    rules = StoreRules(open_backend("redis+cluster://host"))
    with pytest.raises(NotSupported, match=r"redis\+cluster: does not support unique keys with scope"):
        rules.check_later(Draft(body=b"", unique_key="k", unique=Unique(scope="app")), 0.0)
