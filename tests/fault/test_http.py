"""C17: for any HTTP request, the server never fails with a 5xx and never touches a file outside the root."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qworker.backend.registry import open_backend
from tests.support.depth import DEPTH
from tests.support.serving import Served, served
from tests.support.waiting import wait_for

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
LIMIT = 64 * 1024

TRAVERSAL = [
    "/../secret", "/..%2fsecret", "/%2e%2e/secret", "/%2e%2e%2fsecret", "/..%252fsecret", "/%c0%ae%c0%ae/secret",
    "/./..",
    "/alpha/messages/../../../secret", "/alpha/messages/..%2f..%2f..%2fsecret", "/alpha/messages/%2e%2e%2fsecret",
    "/alpha/../secret/messages", "/..;/secret", "/%00", "/alpha%00", "/alpha/messages/%00", "/\\..\\secret",
    "/%5c..%5csecret",
    "/alpha:beta", "/alpha/messages/beta:gamma", "/.qworker", "/.qworker/messages", "/new", "/%ff%fe",
    "/alpha/messages/%ff",
    "//alpha/messages", "/" + "a" * 65, "/" + "a" * 5000, "/alpha/messages/" + "b" * 5000, "/-", "/-/", "/-/..",
    "/-/../alpha",
    "/-/..%2fsecret/stats", "/-/alpha/messages/..%2f..%2fsecret", "/-/alpha/browse?state=../secret",
    "/-/alpha/browse?limit=-1",
    "/-/alpha/lease?limit=nan", "/alpha/messages?wait=nan", "/alpha/messages?wait=-1", "/alpha/messages?wait=1e400",
    "/alpha/messages?visibility_timeout=0", "/alpha/messages?%zz",
    "/alpha/messages?" + "&".join(f"a{n}=1" for n in range(100)),
    "*", "http://evil.example/alpha", "alpha", "/~root", "/$(reboot)", "/alpha?;&=", "/secret", "/queues/../../secret",
]  # fmt: skip
METHODS = ["GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "OPTIONS"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("http")
    (place / "secret").write_bytes(b"outside")
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Served]:
    backend = open_backend(f"mq://{place}/root?sync=off", remote_leases=True)
    bounds = {"header_deadline": 1.0, "body_deadline": 1.0, "most": 40}
    with served(backend, bounds=bounds, body_limit=LIMIT) as running:
        yield running


@pytest.fixture(autouse=True)
def untouched(server: Served, place: Path) -> Iterator[None]:
    """After each test: the outside is as it was, and the server still works."""
    yield
    assert sorted(path.name for path in place.iterdir()) == ["root", "secret"]
    assert (place / "secret").read_bytes() == b"outside"
    assert {path.name for path in (place / "root").iterdir()} == {"new", "queues", "delay", "remove", ".qworker"}
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) for name in os.listdir(place / "root" / "queues"))
    # On a busy machine the request can be later than the deadline of the headers.
    wait_for(lambda: statuses(exchange(server, request("PUT", "/alive"))) == [201], "the server works")


def exchange(server: Served, *pieces: bytes, end: bool = False) -> bytes:
    """Send bytes, and read until the server closes.

    With `end`, a server that waits for more is told after a moment that there is none. Not at once: to it, a client
    that ends is a client that went away, and an answer to nobody proves nothing.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=50) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except OSError:
            # Refused before all was sent: read what it says.
            pass
        parts: list[bytes] = []
        connection.settimeout(0.2 if end else 50)
        while True:
            try:
                part = connection.recv(1 << 16)
            except TimeoutError:
                assert end, "the server neither answers nor closes"
                end = False
                connection.settimeout(50)
                connection.shutdown(socket.SHUT_WR)
                continue
            except ConnectionResetError:
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in STATUS.findall(answer)]


def never_our_fault(answer: bytes) -> None:
    assert not [status for status in statuses(answer) if status >= 500], answer[:500]
    assert b"outside" not in answer


def request(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [
        f"{method} {target} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body


@pytest.mark.parametrize("method", METHODS)
def test_no_path_leads_out_of_the_root(server: Served, method: str) -> None:
    for target in TRAVERSAL:
        answer = exchange(server, request(method, target, body=b"x" if method in {"POST", "PUT"} else b""))
        never_our_fault(answer)
        # An answer, or a refusal to talk at all: never silence.
        assert statuses(answer), (method, target)


@settings(max_examples=60 * DEPTH, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from([*METHODS, "get", "BREW", ""]),
    target=st.one_of(
        st.sampled_from(["/alpha", "/alpha/messages", "/-/settle", "/-/extend", "/-/alpha/publish", "/-/alpha/lease",
        "/-/wait"]),
        st.text(st.characters(max_codepoint=255), max_size=40).map(lambda text: "/" + text),
    ),
    headers=st.lists(
        st.one_of(
            st.sampled_from([
                "X-Lease-Token: 1", "X-Lease-Token: -1", "X-Lease-Token: " + "9" * 400, "Idempotency-Key: ",
                "Idempotency-Key: k",
                "Transfer-Encoding: chunked", "Content-Length: 5", "Content-Length: -1", "Expect: 100-continue",
                "Upgrade: websocket\r\nConnection: upgrade", "Content-Encoding: gzip", "Host: x", "Range: bytes=0-",
            ]),
            st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=60),
        ),
        max_size=5,
    ),
    body=st.one_of(
        st.binary(max_size=200),
        st.sampled_from([
            b"[]", b"{}", b"null", b"[" * 5000, b'[{"body":"AA=="}]', b'[{"body":"AA==","id":"../../x"}]',
            b'{"ids":["../x"]}',
            b'[{"lease":{"queue":"../q","id":"x","token":1},"action":"ack"}]',
            b'{"leases":[],"visibility_timeout":1e308}',
            b'[{"body":"AA==","delay":1e300}]', b'[{"body":"AA==","enqueued_at":-1e300}]',
            b'[{"body":"AA==","tries":-5}]',
            b'{"queues":["alpha"],"timeout":-1}', b'{"queues":["../x"],"timeout":0}',
            b'[{"body":"AA==","due_at":1e999}]',
            b'{"leases":[{"queue":"a","id":"../x","token":99999999999999999999}],"visibility_timeout":1}',
        ]),
    ),
)  # fmt: skip
def test_nothing_that_is_sent_is_the_server_s_fault(
    server: Served, method: str, target: str, headers: list[str], body: bytes
) -> None:
    never_our_fault(exchange(server, request(method, target, *headers, body=body), end=True))


@settings(max_examples=60 * DEPTH, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(st.binary(max_size=300), st.sampled_from([
    b"POST /alpha/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"ffffffffffffffffff\r\n", b"-1\r\n", b"5;ext=\"\r\n", b"GET /alpha/messages HTTP/1.1\r\n", b"Host: localhost\r\n",
    b"\r\n",
    b"GET / HTTP/0.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00", b"Content-Length: 3\r\n",
])), max_size=8))  # fmt: skip
def test_no_bytes_at_all_break_the_server(server: Served, pieces: list[bytes]) -> None:
    never_our_fault(exchange(server, *pieces, end=True))


@pytest.mark.parametrize("chunk", [b"zz\r\nhello\r\n", b"ffffffffffffffff1\r\n", b"5\r\nhelloXX", b"-5\r\nhello\r\n"])
def test_a_bad_chunk_stores_nothing(server: Served, place: Path, chunk: bytes) -> None:
    head = b"POST /chunked/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(server, head, b"2\r\nab\r\n", chunk, end=True)
    assert all(status == 400 for status in statuses(answer)), answer
    assert not (place / "root" / "queues" / "chunked").exists()


def test_a_body_that_ends_early_stores_nothing(server: Served, place: Path) -> None:
    head = b"POST /early/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    answer = exchange(server, head, b"only this", end=True)
    assert all(status in {400, 408} for status in statuses(answer)), answer
    assert not (place / "root" / "queues" / "early").exists()


def test_a_huge_body_is_cut_off(server: Served, place: Path) -> None:
    declared = f"POST /huge/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    chunked = b"POST /huge/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    for pieces in ([declared, b"x" * 100_000], [chunked, *[piece] * 40]):
        answer = exchange(server, *pieces)
        # The reset that follows may be faster than the answer.
        assert statuses(answer) in ([413], [])
    assert not (place / "root" / "queues" / "huge").exists()


@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"GET /alpha",
        b"GET /alpha HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"POST /slow/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhalf",
    ],
)
def test_a_request_that_never_ends_is_ended(server: Served, half: bytes) -> None:
    answer = exchange(server, half)
    assert statuses(answer) == [408]


@pytest.mark.parametrize("before", [b"", b"PUT /alive HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["new", "used"])
@pytest.mark.parametrize(("start", "rest"), [(b"GET /", b"a"), (b"", b"\r\n")], ids=["a request", "empty lines"])
def test_a_drop_at_a_time_does_not_keep_a_connection(server: Served, before: bytes, start: bytes, rest: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=50) as connection:
        deadline = time.monotonic() + 50
        if before:
            connection.sendall(before)
            assert statuses(connection.recv(1000)) == [201]
        drops = itertools.chain(start, itertools.cycle(rest))
        refused = False
        while not refused:
            assert time.monotonic() < deadline, "the server still listens to the drops"
            try:
                connection.sendall(bytes([next(drops)]))
                connection.settimeout(0.05)
                answer = connection.recv(100)
                assert statuses(answer) in ([408], [])
                refused = True
            except TimeoutError:
                continue
            except OSError:
                refused = True


BODIES = [
    b"[]", b"{}", b"null", b"[" * 5000, b"\xff\xfe", b'[{"body":"AA=="}]', b'[{"body":"AA==","id":"../../x"}]',
    b'{"ids":["../x"]}', b'{"ids":["x",""]}', b'[{"lease":{"queue":"../q","id":"x","token":1},"action":"ack"}]',
    b'[{"lease":{"queue":"q","id":"../x","token":1},"action":"ack"}]',
    b'[{"lease":{"queue":"q","id":"a","token":-1},"action":"ack"}]',
    b'[{"lease":{"queue":"q","id":"\\u0000","token":1},"action":"ack"}]', b'{"leases":[],"visibility_timeout":1e308}',
    b'[{"body":"AA==","delay":1e300}]', b'[{"body":"AA==","delay":-1}]', b'[{"body":"AA==","enqueued_at":-1e300}]',
    b'[{"body":"AA==","enqueued_at":1e300}]', b'[{"body":"AA==","tries":-5}]',
    b'[{"body":"AA==","tries":99999999999999}]',
    b'[{"body":"AA==","priority":77}]', b'[{"body":"AA==","unique_key":""}]', b'[{"body":"AA==","due_at":1e300}]',
    b'[{"body":"!!!"}]', b'{"queues":["alpha"],"timeout":-1}', b'{"queues":["../x"],"timeout":0}',
    b'{"leases":[{"queue":"a","id":"../x","token":99999999999999999999}],"visibility_timeout":1}', b'{"delay":1e300}',
    b'{"delay":-1}',
    b'{"state":7}', b'{"state":"fail"}', b'{"unchanged":7}', b'{"unchanged":[7]}', b'{"unchanged":[{"state":[]}]}',
    b'{"ids":"x"}', b'{"ids":[7]}',
    b'{"unchanged":[{"id":"x","state":"failed","finished_at":"x"}]}',
    b'{"unchanged":[{"id":"x","state":"failed","finished_at":1e308}]}',
    b'{"action":"ack"}', b'{"error":"\\ud800"}',
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
def test_no_document_is_the_server_s_fault(server: Served, body: bytes) -> None:
    for target in (
        *(f"/-/alpha/{what}" for what in ("publish", "lease", "requeue", "remove", "reap")),
        *("/-/settle", "/-/extend", "/-/wait"),
        *(f"/-/alpha/messages/x/{how}" for how in ("ack", "retry", "release", "explode")),
    ):
        answer = exchange(server, request("POST", target, "X-Lease-Token: 1", body=body))
        never_our_fault(answer)
        assert statuses(answer), target


def test_headers_without_end_are_refused(server: Served) -> None:
    answer = exchange(server, b"GET /alpha HTTP/1.1\r\nHost: localhost\r\n", b"X-Pad: " + b"a" * 100_000)
    assert statuses(answer) in ([431], [400], [])


def test_more_polls_than_allowed_are_refused_and_the_others_served(server: Served) -> None:
    poll = request("GET", "/alive/messages?wait=60")
    exchange(server, request("PUT", "/alive"))
    opened: list[socket.socket] = []
    try:
        refused = 0
        deadline = time.monotonic() + 50
        while not refused:
            assert time.monotonic() < deadline, "no poll was refused"
            opened.append(socket.create_connection(("127.0.0.1", server.port), timeout=50))
            try:
                opened[-1].sendall(poll)
                for connection in opened:
                    connection.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        refused += statuses(connection.recv(100, socket.MSG_PEEK)) == [503]
            except ConnectionError:
                # The refusal was faster than the poll.
                refused += 1
        assert len(opened) > 40
    finally:
        for connection in opened:
            connection.close()
    # The places are free again as soon as the server has seen the ends.
    wait_for(lambda: statuses(exchange(server, request("PUT", "/alive"))) == [201], "a free place")
