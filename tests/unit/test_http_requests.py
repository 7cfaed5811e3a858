"""Where a request ends, in which order requests are answered, and which connection gives way to another one."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from tests.support.waiting import PATIENCE, wait_for
from tests.unit.test_asgi import App, connect, exchange, read_all, serving

INNER = b"PUT /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n%b" % (len(INNER), INNER)
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(INNER), INNER)
PLAIN = b"GET /a?keep HTTP/1.1\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\n\r\n"


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def port(app: App) -> Iterator[int]:
    with serving(app, header_deadline=PATIENCE, body_deadline=PATIENCE) as port:
        yield port


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("body", [LENGTH, CHUNKS], ids=["length", "chunks"])
@pytest.mark.parametrize("cut", ["nowhere", "before the body", "everywhere"])
def test_the_body_of_a_request_that_offers_another_protocol_is_its_body(
    app: App, port: int, version: bytes, body: bytes, cut: str
) -> None:
    if version == b"1.0" and body is CHUNKS:
        version = b"1.1"
    request = b"POST /a HTTP/%b\r\n%b%b" % (version, OFFER, body)
    place = request.index(b"\r\n\r\n") + 4
    pieces = {
        "nowhere": [request],
        "before the body": [request[:place], request[place:]],
        "everywhere": [bytes([byte]) for byte in request],
    }[cut]
    with connect(port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            if cut == "before the body" and piece is pieces[0]:
                wait_for(lambda: app.asked == ["/a"], "the request")
        answer = read_all(connection)
    assert answer.endswith(b"\r\n\r\n%d" % len(INNER))
    assert statuses(answer) == [200]
    assert app.asked == ["/a"]


def test_what_follows_an_offer_is_answered(app: App, port: int) -> None:
    offer = b"GET /offer?keep HTTP/1.1\r\n" + OFFER + b"\r\n"
    assert statuses(exchange(port, offer + PLAIN + offer + LAST)) == [200] * 4
    assert app.asked == ["/offer", "/a", "/offer", "/last"]


@pytest.mark.parametrize("cut", [0, 2], ids=["whole", "in pieces"])
def test_a_trailer_is_not_a_header(app: App, port: int, cut: int) -> None:
    request = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
    with connect(port) as connection:
        connection.sendall(request[: len(request) - cut])
        if cut:
            wait_for(lambda: app.asked == ["/a"], "the request")
            connection.sendall(request[-cut:])
        assert statuses(read_all(connection)) == [200]
    assert [name for name, _ in app.headers] == [b"transfer-encoding"]


def test_nothing_behind_the_last_request_of_a_connection_is_answered(app: App, port: int) -> None:
    last = b"GET /last?keep HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert statuses(exchange(port, PLAIN + last + PLAIN)) == [200, 200]
    assert app.asked == ["/a", "/last"]


def test_nothing_behind_connect_is_a_request(app: App, port: int) -> None:
    assert statuses(exchange(port, b"CONNECT localhost:80 HTTP/1.1\r\n\r\n" + INNER)) == [400]
    assert not app.asked


BROKEN = {
    "no request": (b"nonsense\r\n\r\n", 400),
    "two lengths": (b"POST /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "a bad chunk": (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    "long headers": (b"GET /a HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_requests_ahead_of_a_broken_one_are_answered(port: int, broken: str) -> None:
    request, status = BROKEN[broken]
    assert statuses(exchange(port, PLAIN + PLAIN + request)) == [200, 200, status]


def test_headers_behind_a_request_are_limited_when_they_arrive_in_pieces(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(PLAIN + b"GET /a HTTP/1.1\r\nX: " + b"x" * 20_000)
        assert statuses(connection.recv(1000)) == [200]
        connection.sendall(b"\r\nY: " + b"y" * 40_000)
        assert statuses(read_all(connection)) == [431]


def test_a_long_body_ahead_of_a_request_is_no_long_header(port: int) -> None:
    body = b"POST /a?keep HTTP/1.1\r\nContent-Length: 50000\r\n\r\n" + b"x" * 50_000
    with connect(port) as connection:
        for piece in (body[:20_000], body[20_000:] + LAST[:10], LAST[10:]):
            connection.sendall(piece)
        assert statuses(read_all(connection)) == [200, 200]


@pytest.mark.parametrize("size", [64 * 1024, 1 << 20])
@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["complete", "incomplete"])
def test_a_client_that_sends_too_long_headers_is_told(port: int, size: int, end: bytes) -> None:
    for _ in range(20):
        assert statuses(exchange(port, b"GET /a HTTP/1.1\r\nX: " + b"x" * size + end)) == [431]


def test_a_silent_connection_gives_way_to_a_request(app: App) -> None:
    with serving(app, most=3, header_deadline=PATIENCE) as port:
        kept, half, silent = connect(port), connect(port), connect(port)
        kept.sendall(PLAIN)
        assert statuses(kept.recv(1000)) == [200]
        half.sendall(b"GET /half")
        # The silent one waits for the longest time, because a response was sent to the first one later.
        for _ in range(9):
            assert statuses(exchange(port, LAST)) == [200]
        for connection in (kept, half, silent):
            connection.close()


def test_a_body_that_does_not_arrive_gives_way_to_a_request(app: App) -> None:
    with serving(app, most=2, body_deadline=PATIENCE) as port:
        half = [connect(port), connect(port)]
        for connection in half:
            connection.sendall(b"POST /half HTTP/1.1\r\nContent-Length: 9\r\n\r\nhal")
        wait_for(lambda: app.asked == ["/half", "/half"], "the requests")
        wait_for(lambda: statuses(exchange(port, LAST)) == [200], "a free place")
        for connection in half:
            connection.close()


def test_a_running_request_never_gives_way(app: App) -> None:
    with serving(app, most=2) as port, connect(port) as held:
        held.sendall(b"GET /held HTTP/1.1\r\n\r\n")
        wait_for(lambda: app.asked == ["/held"], "the request")
        silent = [connect(port) for _ in range(20)]
        wait_for(lambda: statuses(exchange(port, LAST)) == [200], "an answer")
        held.setblocking(False)
        with pytest.raises(BlockingIOError):
            held.recv(1)
        for connection in silent:
            connection.close()


def test_headers_must_arrive_sooner_while_connections_are_short(app: App) -> None:
    with serving(app, most=4, header_deadline=10 * PATIENCE) as port:
        silent = [connect(port) for _ in range(4)]
        assert [statuses(read_all(connection)) for connection in silent[:1]] == [[408]]
        for connection in silent:
            connection.close()


def test_one_address_has_only_its_own_share_of_the_connections(app: App) -> None:
    with serving(app, most_per_address=2) as port:
        silent = [connect(port), connect(port)]
        answer = exchange(port, LAST)
        assert statuses(answer) == [503]
        assert b"too many connections from this address" in answer
        other = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE, source_address=("127.0.0.2", 0))
        with other:
            other.sendall(LAST)
            assert statuses(read_all(other)) == [200]
        for connection in silent:
            connection.close()
