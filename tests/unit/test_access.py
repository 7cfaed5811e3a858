"""Which requests the listeners answer: `qworker serve`, the health port and jsonrpcd have the same checks."""

from __future__ import annotations

import base64
import http.client
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from qworker.asgi.access import Access, read_token
from qworker.asgi.limits import limited_protocol
from qworker.asgi.server import ServerThread, bind
from qworker.errors import UsageError
from qworker.health.answers import HealthAnswers
from qworker.health.server import HealthApp
from qworker.server.app import create_app
from qworker.testing import FakeClock
from qworker_fsq.environment import Constants
from qworker_fsq.rpc.methods import RpcMethods
from qworker_fsq.rpc.server import RpcApp
from qworker_memory import MemoryBackend
from tests.support.waiting import PATIENCE

TOKEN = "correct-horse"
CALL = b'{"jsonrpc": "2.0", "id": 1, "method": "api_version"}'
ITEM = "_20131005205643_0_77_host_0"
JSON = "application/json-rpc"


def serve_app(_root: Path, token: str | None) -> Any:
    return create_app(MemoryBackend(f"access-{secrets.token_hex(4)}"), token=token, reaps=False)


def health_app(_root: Path, token: str | None) -> Any:
    return HealthApp(HealthAnswers(list, stall_timeout=60.0), token)


def rpc_app(root: Path, token: str | None) -> Any:
    return RpcApp(RpcMethods(str(root), Constants()), workers=2, body_limit=200, token=token)


LISTENERS: dict[str, tuple[Callable[[Path, str | None], Any], str, str, bytes | None, dict[str, str]]] = {
    "serve": (serve_app, "GET", "/-/queues", None, {}),
    "health": (health_app, "GET", "/metrics", None, {}),
    "jsonrpcd": (rpc_app, "POST", "/", CALL, {"Content-Type": JSON}),
}


class Listener:
    """A running listener, and a request that it answers."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> None:
        self.port, self.method, self.path, self._body, self._headers = port, method, path, body, headers

    def ask(self, *, host: str = "127.0.0.1", source: str = "127.0.0.1", body: bytes = b"", **headers: str) -> int:
        """The status of a request with more headers."""
        connection = http.client.HTTPConnection(host, self.port, timeout=PATIENCE, source_address=(source, 0))
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(self.method, self.path, body or self._body, {**self._headers, **given})
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()


@contextmanager
def listening(name: str, root: Path, token: str | None = None, host: str = "127.0.0.1") -> Iterator[Listener]:
    make, *request = LISTENERS[name]
    app = make(root, token)
    listener = bind(host, 0)
    port: int = listener.getsockname()[1]
    failures: list[Exception] = []
    server = ServerThread(app, limited_protocol(), listener, name=f"access-{name}", on_failure=failures.append)
    try:
        yield Listener(port, *request)
    finally:
        server.close()
        if isinstance(app, RpcApp):
            app.close()
    assert not failures


@pytest.fixture(params=LISTENERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PAGES = [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}]


@pytest.mark.parametrize("headers", [*PAGES, {"Host": "evil.example"}, {"Host": "0.0.0.0"}, {"Host": "::2"}], ids=str)
def test_no_web_page_is_served_without_a_token(name: str, headers: dict[str, str], tmp_path: Path) -> None:
    with listening(name, tmp_path) as listener:
        assert listener.ask(**headers) == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.1.1:80", "[::1]", "[::1]:80", "::1"])
def test_programs_on_this_machine_are_served_without_a_token(name: str, host: str, tmp_path: Path) -> None:
    with listening(name, tmp_path) as listener:
        assert listener.ask(Host=host) == 200


def test_a_listener_on_the_loopback_of_ipv6_is_reached_by_its_address(name: str, tmp_path: Path) -> None:
    with listening(name, tmp_path, host="::1") as listener:
        assert listener.ask(host="::1", source="::1") == 200


def test_a_token_is_required_from_every_client(name: str, tmp_path: Path) -> None:
    basic = "Basic " + base64.b64encode(f"x:{TOKEN}".encode()).decode()
    with listening(name, tmp_path, TOKEN) as listener:
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Digest {TOKEN}"}):
            assert listener.ask(**wrong) == 401
        for value in ("Basic !", "Basic", "Bearer", TOKEN):
            assert listener.ask(Authorization=value) == 401
        assert listener.ask(Authorization=f"Bearer {TOKEN}", Host="queue.example") == 200
        assert listener.ask(Authorization=f"bearer {TOKEN}") == 200
        assert listener.ask(Authorization=basic, Host="queue.example") == 200
        # A browser sends a password that it remembers with the requests of any page.
        assert listener.ask(Authorization=basic, Origin="http://evil.example") == 403


def test_an_address_can_guess_only_some_tokens(name: str, tmp_path: Path) -> None:
    with listening(name, tmp_path, TOKEN) as listener:
        answers = [listener.ask(Authorization=f"Bearer guess-{number}") for number in range(40)]
        assert answers[:10] == [401] * 10
        assert 429 in answers
        assert listener.ask(source="127.0.0.2", Authorization=f"Bearer {TOKEN}") == 200


def test_clients_that_send_half_a_request_keep_nobody_from_an_answer(name: str, tmp_path: Path) -> None:
    with listening(name, tmp_path) as listener:
        halves = [socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE) for _ in range(20)]
        for number, half in enumerate(halves):
            half.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\nContent-Type: a/b\r\n\r\nhal"[: 1 + 5 * number])
        assert listener.ask() == 200
        for half in halves:
            half.close()


def scope(token: str, address: str = "192.0.2.1") -> dict[str, Any]:
    return {"headers": [(b"authorization", b"Bearer " + token.encode())], "client": (address, 4242)}


def status_of(access: Access, token: str, address: str = "192.0.2.1") -> int:
    refusal = access.refusal(scope(token, address))
    return 200 if refusal is None else refusal[0]


def test_the_right_token_is_compared_again_a_second_after_the_last_guess() -> None:
    clock = FakeClock()
    access = Access(TOKEN, clock=clock)
    assert [status_of(access, f"guess-{number}") for number in range(12)] == [401] * 10 + [429] * 2
    assert status_of(access, TOKEN) == 429
    clock.advance(1.01)
    assert status_of(access, TOKEN) == 200
    assert status_of(access, "guess-20") == 401
    assert status_of(access, "guess-21") == 429
    clock.advance(60.0)
    assert [status_of(access, f"other-{number}") for number in range(12)] == [401] * 10 + [429] * 2


def test_a_program_with_an_old_token_does_not_lock_out_the_others_of_its_address() -> None:
    access = Access(TOKEN, clock=FakeClock())
    assert {status_of(access, "the-old-token") for _ in range(100)} == {401}
    assert status_of(access, TOKEN) == 200


def test_the_addresses_of_one_network_guess_together() -> None:
    access = Access(TOKEN, clock=FakeClock())
    for number in range(10):
        assert status_of(access, f"guess-{number}", f"2001:db8::{number + 1:x}") == 401
    assert status_of(access, TOKEN, "2001:db8::ffff") == 429
    assert status_of(access, TOKEN, "2001:db8:1::1") == 200


@pytest.mark.parametrize("token", ["", "short", "not ascii é", "line\nbreak"])
def test_a_token_that_cannot_be_sent_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWORKER_HTTP_TOKEN", token)
    with pytest.raises(UsageError, match="QWORKER_HTTP_TOKEN"):
        read_token()


def test_a_token_under_its_name_of_0_1_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWORKER_TOKEN", "correct horse")
    with pytest.raises(UsageError, match="QWORKER_TOKEN is now QWORKER_HTTP_TOKEN: rename the variable"):
        read_token()
    monkeypatch.setenv("QWORKER_HTTP_TOKEN", "battery staple")
    assert read_token() == "battery staple"


# -- jsonrpcd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b", ""])
def test_jsonrpcd_takes_no_form_without_a_token(tmp_path: Path, kind: str) -> None:
    for part in ("tmp", "queue", "done", "fail"):
        (tmp_path / "q" / part).mkdir(parents=True)
    call = b'{"jsonrpc":"2.0","id":1,"method":"enqueue","params":["%b","q","data"]}' % ITEM.encode()
    with listening("jsonrpcd", tmp_path) as listener:
        assert listener.ask(body=call, Content_Type=kind) == 415
        for page in PAGES:
            assert listener.ask(body=call, **page) == 403
        assert os.listdir(tmp_path / "q" / "queue") == []
        assert listener.ask(body=call) == 200
        assert os.listdir(tmp_path / "q" / "queue") == [ITEM]


def test_jsonrpcd_answers_only_calls_of_bounded_size(tmp_path: Path) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with listening("jsonrpcd", tmp_path, TOKEN) as listener:
        assert listener.ask(body=CALL + b" " * 500, **bearer) == 413
        assert listener.ask(Content_Type="text/plain", **bearer) == 200
        listener.path = "/other"
        assert listener.ask(**bearer) == 404
        listener.path = "/RPC2"
        assert listener.ask(**bearer) == 200
        listener.method = "GET"
        assert listener.ask(**bearer) == 405


# -- the health port ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["10.1.2.3", "fd00::1"])
def test_metrics_are_read_under_any_name_of_another_address(server: str) -> None:
    access = Access(None, public=True)
    headers = [(b"host", b"pod.example:9090")]
    assert access.refusal({"headers": headers, "server": (server, 9090)}) is None
    for loopback in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        refusal = access.refusal({"headers": headers, "server": (loopback, 9090)})
        assert refusal is not None
        assert refusal[0] == 403
