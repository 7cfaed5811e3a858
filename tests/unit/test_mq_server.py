from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from qworker.asgi.access import require_token_if_public
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable, InvalidURL, NotSupported, PermissionDenied, StorageFull, UsageError
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.names import to_message_id
from qworker.server.openapi import document
from qworker.testing.wait_until import wait_until
from qworker_memory import MemoryBackend
from qworker_mq.ids import new_uuids
from tests.support.servers import RedisServer
from tests.support.serving import Response, Served, ask, served


def memory() -> MemoryBackend:
    return MemoryBackend(f"server-{secrets.token_hex(4)}")


@pytest.fixture
def server() -> Iterator[Served]:
    with served(memory(), body_limit=1000) as running:
        yield running


def test_a_message_makes_the_round_on_any_backend(server: Served) -> None:
    body = bytes(range(256))
    assert ask(server, "GET", "/inbox")[0] == 404
    status, headers, _ = ask(server, "POST", "/inbox/messages", body)
    assert status == 201
    assert ask(server, "GET", "/inbox")[0] == 200
    status, got, content = ask(server, "GET", "/inbox/messages")
    assert (status, got["X-Message-Id"], content) == (200, headers["X-Message-Id"], body)
    assert ask(server, "GET", "/inbox/messages")[0] == 204
    for _ in range(2):
        assert ask(server, "DELETE", f"/inbox/messages/{headers['X-Message-Id']}")[0] == 202
    assert ask(server, "DELETE", "/inbox")[0] == 200
    assert ask(server, "GET", "/inbox")[0] == 404


@pytest.mark.parametrize("chosen", ["order-17", "an order, of: é 漢", "..%2f", "0" * 100, "a" * 500])
def test_a_message_is_found_and_deleted_by_any_id_that_its_publisher_chose(server: Served, chosen: str) -> None:
    def publish() -> Response:
        return ask(server, "POST", "/-/inbox/publish", json.dumps([{"body": "eA==", "id": chosen}]).encode())

    ids = json.loads(publish()[2])
    assert ids == json.loads(publish()[2]) == [to_message_id(chosen)]
    path = f"/inbox/messages/{quote(chosen, safe='')}"
    assert json.loads(ask(server, "GET", f"/-{path}")[2])["message"]["id"] == ids[0]
    found = json.loads(ask(server, "POST", "/-/inbox/find", json.dumps({"ids": [chosen, *ids]}).encode())[2])
    assert [stored["message"]["id"] for stored in found] == ids
    assert ask(server, "GET", f"/-{path}/history")[::2] == (200, b"[]")
    assert ask(server, "DELETE", path)[0] == 202
    assert ask(server, "GET", f"/-{path}")[0] == 404
    publish()
    assert ask(server, "POST", "/-/inbox/remove", json.dumps({"ids": [chosen]}).encode())[2] == b"1"


@pytest.mark.parametrize("chosen", ["", "\ud800"])
def test_a_text_that_cannot_be_an_id_is_refused_with_one_line(server: Served, chosen: str) -> None:
    body = json.dumps([{"body": "eA==", "id": chosen}]).encode()
    status, _, text = ask(server, "POST", "/-/inbox/publish", body)
    assert status == 400
    assert len(text.splitlines()) == 1


def test_an_empty_message_is_a_message(server: Served) -> None:
    assert ask(server, "POST", "/inbox/messages", b"")[0] == 201
    status, headers, content = ask(server, "GET", "/inbox/messages")
    assert (status, headers["Content-Length"], content) == (200, "0", b"")


@pytest.mark.parametrize(
    "path",
    ["/", "/a/", "/a/b", "/a/messages/", "/a/messages/b/c", "/..", "/%2e%2e", "/a%2fb", "//a", "/-", "/-/x/y/z/w"],
)
def test_every_other_path_is_404(server: Served, path: str) -> None:
    assert ask(server, "GET", path)[0] == 404
    assert ask(server, "PATCH", path)[0] == 404


def test_a_body_over_the_limit_is_413_and_not_stored(server: Served) -> None:
    assert ask(server, "POST", "/inbox/messages", b"x" * 1000)[0] == 201
    status, _, body = ask(server, "POST", "/inbox/messages", b"x" * 1001)
    assert (status, body) == (
        413,
        b"the body is too large: send less, or raise --max-body-size, and max_body in the URL of the server",
    )
    assert json.loads(ask(server, "GET", "/-/inbox/stats")[2])["ready"] == 1


@pytest.mark.parametrize(
    "length", [b"Content-Length: 20000000", b"Transfer-Encoding: chunked"], ids=["length", "chunks"]
)
def test_a_client_that_sends_too_much_reads_why(server: Served, length: bytes) -> None:
    body = b"1312d00\r\n" * (b"chunked" in length) + b"x" * 20_000_000
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=50) as client:
            client.sendall(b"POST /q/messages HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n%b" % (length, body))
            assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_an_idempotency_key_stores_one_message(server: Served) -> None:
    ids = {ask(server, "POST", "/inbox/messages", b"x", Idempotency_Key="k")[1]["X-Message-Id"] for _ in range(3)}
    assert len(ids) == 1
    assert ask(server, "POST", "/inbox/messages", b"other", Idempotency_Key="k")[0] == 422
    assert ask(server, "POST", "/inbox/messages", b"x", Idempotency_Key="k2")[1]["X-Message-Id"] not in ids
    assert json.loads(ask(server, "GET", "/-/inbox/stats")[2])["ready"] == 2


def test_an_idempotency_key_holds_beyond_a_restart_while_the_message_is_stored(tmp_path: Path) -> None:
    ids: set[str] = set()
    for _ in range(2):
        with served(open_backend(f"mq://{tmp_path}/root?sync=off", remote_leases=True)) as server:
            ids.add(ask(server, "POST", "/q/messages", b"x", Idempotency_Key="k")[1]["X-Message-Id"])
    assert len(ids) == 1
    assert len(list((tmp_path / "root" / "queues" / "q").iterdir())) == 1


@pytest.mark.parametrize("call", ["requeue", "remove"])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"id":["x"]}', b'{"ids":[],"state":"failed"}'])
def test_what_selects_nothing_or_too_much_is_refused(server: Served, call: str, body: bytes) -> None:
    ask(server, "POST", "/q/messages", b"x")
    status, _, text = ask(server, "POST", f"/-/q/{call}", body)
    assert (status, b"exactly one of ids, state and unchanged" in text) == (400, True)
    assert ask(server, "GET", "/q/messages")[2] == b"x"


def test_a_long_poll_returns_with_what_comes_meanwhile(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Response] = []
    lease, polled = server.app.backend.lease, threading.Event()

    async def report_and_lease(queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        polled.set()
        return await lease(queue, limit, visibility, timeout)

    monkeypatch.setattr(server.app.backend, "lease", report_and_lease)
    poll = threading.Thread(target=lambda: answers.append(ask(server, "GET", "/inbox/messages?wait=45")))
    poll.start()
    assert polled.wait(timeout=40)
    assert ask(server, "POST", "/inbox/messages", b"late")[0] == 201
    poll.join(timeout=40)
    assert not poll.is_alive()
    assert (answers[0][0], answers[0][2]) == (200, b"late")


def test_a_lease_is_extended_and_settled_by_its_token_only(server: Served) -> None:
    ask(server, "POST", "/inbox/messages", b"x")
    _, headers, _ = ask(server, "GET", "/inbox/messages?visibility_timeout=5")
    path, token = f"/inbox/messages/{headers['X-Message-Id']}", headers["X-Lease-Token"]
    status, extended, _ = ask(server, "PATCH", f"/-{path}?visibility_timeout=500", X_Lease_Token=token)
    assert (status, float(extended["X-Lease-Expires"]) > float(headers["X-Lease-Expires"]) + 400) == (200, True)
    assert ask(server, "PATCH", f"/-{path}")[0] == 400
    wrong = str(int(token) + 1)
    assert ask(server, "PATCH", f"/-{path}", X_Lease_Token=wrong)[0] == 409
    assert ask(server, "DELETE", path, X_Lease_Token=wrong)[0] == 409
    assert ask(server, "POST", f"/-{path}/retry", b'{"error": "again"}', X_Lease_Token=token)[0] == 202
    assert ask(server, "DELETE", path, X_Lease_Token=token)[0] == 409
    _, again, _ = ask(server, "GET", "/inbox/messages")
    assert again["X-Message-Tries"] == "1"
    assert ask(server, "DELETE", path, X_Lease_Token=again["X-Lease-Token"])[0] == 202
    assert ask(server, "GET", f"/-{path}")[0] == 404


@pytest.mark.parametrize("call", [("GET", "/inbox/messages?"), ("POST", "/-/inbox/lease?limit=1&")])
def test_a_client_of_0_1_leases_nothing_that_it_could_not_settle(server: Served, call: tuple[str, str]) -> None:
    ask(server, "POST", "/inbox/messages", b"x")
    status, _, reason = ask(server, call[0], f"{call[1]}visibility=30")
    assert (status, b"upgrade the client to qworker 0.2" in reason) == (400, True)
    assert json.loads(ask(server, "GET", "/-/inbox/stats")[2])["ready"] == 1


async def test_a_server_of_0_1_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qworker.server.native_routes.__version__", "0.1.0")
    with served(memory()) as server:
        backend = open_backend(f"mq+http://127.0.0.1:{server.port}")
        with pytest.raises(BackendUnavailable, match=r"is qworker 0\.1\.0: upgrade the server to 0\.2 first"):
            await backend.open()
        await backend.aclose()


@pytest.fixture(params=["mq", "file", "redis"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that outlives a server."""
    if request.param != "redis":
        yield f"{request.param}://{tmp_path}/root?sync=off"
        return
    with RedisServer() as redis:
        yield redis.url


def test_a_lease_outlives_the_server(shared_url: str) -> None:
    url = shared_url
    with served(open_backend(url, remote_leases=True)) as server:
        ask(server, "POST", "/q/messages", b"x")
        _, headers, _ = ask(server, "GET", "/q/messages?visibility_timeout=600")
    path, token = f"/q/messages/{headers['X-Message-Id']}", headers["X-Lease-Token"]
    with served(open_backend(url, remote_leases=True)) as server:
        assert ask(server, "POST", "/-/q/reap")[2] == b"0"
        assert ask(server, "GET", "/q/messages")[0] == 204
        assert ask(server, "PATCH", f"/-{path}?visibility_timeout=700", X_Lease_Token=token)[0] == 200
        assert ask(server, "DELETE", path, X_Lease_Token=token)[0] == 202
        assert json.loads(ask(server, "GET", "/-/stats")[2])[0]["leased"] == 0


class Full(MemoryBackend):
    async def publish(self, queue: str, drafts: object) -> list[str]:
        raise StorageFull("no space is left in /somewhere/secret")


def test_what_cannot_be_stored_is_503_and_says_when_to_come_again() -> None:
    with served(Full(f"full-{secrets.token_hex(4)}")) as server:
        status, headers, body = ask(server, "POST", "/q/messages", b"x")
        assert (status, headers["Retry-After"], body) == (503, "10", b"")


def test_with_a_token_nobody_is_served_without_it() -> None:
    with served(memory(), token="correct horse") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic correct horse"}):
            status, _, body = ask(server, "PUT", "/q", None, **headers)
            assert (status, b"Bearer TOKEN" in body) == (401, True)
            assert ask(server, "GET", "/-/queues", None, **headers)[0] == 401
        assert ask(server, "PUT", "/q", Authorization="Bearer correct horse")[0] == 201
        # From wherever: with the token it is no page of somebody else's.
        assert ask(server, "GET", "/q", Authorization="Bearer correct horse", Host="queue.example")[0] == 200


def test_without_a_token_web_pages_and_other_hosts_are_refused(server: Served) -> None:
    assert ask(server, "POST", "/q/messages", b"x", Origin="http://evil.example")[0] == 403
    assert ask(server, "POST", "/q/messages", b"x", Sec_Fetch_Site="cross-site")[0] == 403
    for headers, reason in (({"Origin": "http://evil.example"}, b"web page"), ({"Host": "0.0.0.0"}, b"127.0.0.1")):
        status, _, body = ask(server, "GET", "/q", None, **headers)
        assert (status, reason in body, b"QWORKER_HTTP_TOKEN" in body) == (403, True, True)
    assert ask(server, "POST", "/q/messages", b"x", Host="evil.example")[0] == 403
    assert ask(server, "GET", "/q")[0] == 404


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "queue.example", ""])
def test_listening_beyond_this_machine_needs_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="QWORKER_HTTP_TOKEN"):
        require_token_if_public(host, None)
    require_token_if_public(host, "long enough")
    for local in ("127.0.0.1", "::1", "localhost"):
        require_token_if_public(local, None)


def test_the_openapi_document_has_every_path_that_is_served(server: Served) -> None:
    served_document = json.loads(ask(server, "GET", "/-/openapi.json")[2])
    assert served_document["paths"].keys() == document()["paths"].keys()
    from qworker.server.native_routes import NativeRoutes

    routes = {
        (route.path, method.lower())
        for route in NativeRoutes(server.app.backend, server.app.leases, server.app.memory, lease_time=1.0).routes()
        for method in route.methods or ()
    }
    described = {(path, method) for path, item in served_document["paths"].items() for method in item}
    assert {(path, method) for path, method in routes if method != "head"} - described == {("/-/openapi.json", "get")}
    text = json.dumps(served_document)
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in served_document["components"]["schemas"]


async def test_a_server_is_a_backend_with_a_token_that_is_never_printed() -> None:
    with served(memory(), token="s3cret-token") as server:
        backend = open_backend(f"mq+http://:s3cret-token@127.0.0.1:{server.port}")
        assert "s3cret" not in backend.describe()
        await backend.publish("q", [Draft(body=b"x", priority=3, unique_key="k")])
        assert [lease.message.unique_key for lease in await backend.lease("q", 5, 100.0)] == ["k"]
        await backend.aclose()
        stranger = open_backend(f"mq+http://127.0.0.1:{server.port}")
        with pytest.raises(PermissionDenied, match="QWORKER_HTTP_TOKEN"):
            await stranger.open()
        await stranger.aclose()


async def test_a_plain_mq_server_is_a_backend_with_less() -> None:
    with served(memory(), additions=False, visibility_timeout=600.0) as server:
        full = open_backend(f"mq+http://127.0.0.1:{server.port}")
        with pytest.raises(InvalidURL, match="standard_only=1"):
            await full.open()
        await full.aclose()
        backend = open_backend(f"mq+http://127.0.0.1:{server.port}?standard_only=1")
        await backend.open()
        ids = await backend.publish("q", [Draft(body=b"a"), Draft(body=b"b"), Draft(body=b"c")])
        leases = await backend.lease("q", 10, 100.0)
        assert [lease.message.id for lease in leases] == ids
        assert backend.extend(leases, 100.0) == []
        ends = [
            Settlement(lease=leases[0], action=SettleAction.ACK),
            Settlement(lease=leases[1], action=SettleAction.FAIL_PERM),
        ]
        assert await backend.settle([*ends, Settlement(lease=leases[2], action=SettleAction.FAIL_TMP)]) == []
        stats = await server.app.backend.stats("q")
        assert (stats.ready, stats.leased) == (0, 1)
        assert [lease.message.body for lease in await backend.lease("qfailed", 10, 100.0)] == [b"b"]
        for draft in (Draft(body=b"x", delay=5.0), Draft(body=b"x", priority=1), Draft(body=b"x", unique_key="k")):
            with pytest.raises(NotSupported):
                await backend.publish("q", [draft])
        with pytest.raises(NotSupported, match="qworker serve"):
            await backend.stats("q")
        await backend.aclose()


def spawn(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    return subprocess.Popen(
        [sys.executable, "-m", "qworker", *arguments], stderr=subprocess.PIPE, env={**clean, **environment}, cwd=cwd
    )


def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=50)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stderr is not None
        process.stderr.close()


def make_queue(line: str) -> None:
    """Make a queue on the server whose log has this line."""
    found = re.search(r"http://127.0.0.1:(\d+)", line)
    assert found, line
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=50)
    connection.request("PUT", "/q")
    assert connection.getresponse().status == 201
    connection.close()


def test_serve_serves_until_a_signal_and_ends_clean(tmp_path: Path) -> None:
    process = spawn("serve", f"mq://{tmp_path}/root", "--port", "0")
    try:
        assert process.stderr is not None
        make_queue(process.stderr.readline().decode())
        process.send_signal(signal.SIGTERM)
    finally:
        assert ended(process) == 0


def test_serve_says_that_a_store_cannot_keep_leases_over_a_restart(tmp_path: Path) -> None:
    process = spawn("serve", f"vsqs://{tmp_path}/root", "--port", "0")
    try:
        assert process.stderr is not None
        assert "leases_end_with_server" in process.stderr.readline().decode()
        make_queue(process.stderr.readline().decode())
        process.send_signal(signal.SIGTERM)
    finally:
        assert ended(process) == 0


def test_serve_refuses_to_be_reached_without_a_token(tmp_path: Path) -> None:
    process = spawn("serve", f"mq://{tmp_path}/root", "--host", "0.0.0.0", "--port", "0")
    assert process.stderr is not None
    text = process.stderr.read().decode()
    assert ended(process) == 2
    assert "QWORKER_HTTP_TOKEN" in text
    assert len(text.splitlines()) == 1


async def test_mover_and_reaper_take_what_was_there_before_them(tmp_path: Path) -> None:
    new, queues, remove = tmp_path / "new", tmp_path / "queues", tmp_path / "remove"
    for directory in (new, queues, remove):
        directory.mkdir()
    first, second = new_uuids(2)
    (new / f"alpha:{first}").write_bytes(b"1")
    (new / "no message").write_bytes(b"2")
    (remove / f"alpha:{first}").write_bytes(b"3")
    mover = spawn("mq", "mover", "--source", str(new), "--destination", str(queues), "--delay", "1ms")
    reaper = spawn("mq", "reaper", "--source", str(remove))
    try:
        (new / f"beta:{second}").write_bytes(b"4")
        wanted = [queues / "alpha" / first, queues / "beta" / second]
        await wait_until(lambda: all(path.exists() for path in wanted) and not list(remove.iterdir()), 50)
        assert [path.name for path in new.iterdir()] == ["no message"]
    finally:
        for process in (mover, reaper):
            process.send_signal(signal.SIGTERM)
        assert [ended(mover), ended(reaper)] == [0, 0]


def remove(root: Path) -> None:
    shutil.rmtree(root)


def move_away(root: Path) -> None:
    root.rename(root.with_name("away"))


@pytest.mark.parametrize("replace", [remove, move_away])
async def test_mover_and_reaper_find_the_directories_of_a_root_that_was_replaced(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    new, queues, removed = root / "new", root / "queues", root / "remove"

    async def is_moved() -> None:
        for directory in (new, queues, removed):
            directory.mkdir(parents=True, exist_ok=True)
        (message_id,) = new_uuids(1)
        (removed / f"alpha:{message_id}").write_bytes(b"1")
        (new / f"alpha:{message_id}").write_bytes(b"2")
        await wait_until(lambda: (queues / "alpha" / message_id).exists() and not list(removed.iterdir()), 50)

    for directory in (new, queues, removed):
        directory.mkdir(parents=True)
    mover = spawn("mq", "mover", "--source", str(new), "--destination", str(queues))
    reaper = spawn("mq", "reaper", "--source", str(removed))
    try:
        await is_moved()
        replace(root)
        await is_moved()
        for process in (mover, reaper):
            assert process.stderr is not None
            assert b"directory_replaced" in process.stderr.readline()
    finally:
        for process in (mover, reaper):
            process.send_signal(signal.SIGTERM)
        assert [ended(mover), ended(reaper)] == [0, 0]


class Gated(MemoryBackend):
    """A store whose leases of the queue `a` wait, and which knows which fetches have begun."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.gate = threading.Event()

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        self.begun.append(queue)
        if queue == "a":
            await wait_until(self.gate.is_set, 50)
        return await super().lease(queue, limit, visibility, timeout)


@pytest.mark.parametrize("workers", [None, 1, 2, 8])
async def test_the_fetches_of_a_worker_s_queues_run_one_after_another(workers: int | None) -> None:
    # By the CRC-32 of their names, `a` and `j` have the same worker of 2 and of 8, and `d` has another one.
    waits = {None: [], 1: ["d", "j"], 2: ["j"], 8: ["j"]}[workers]
    backend = Gated()
    with served(backend, fetch_workers=workers) as server:
        fetches = [asyncio.create_task(asyncio.to_thread(ask, server, "GET", "/a/messages"))]
        await wait_until(lambda: backend.begun == ["a"], 50)
        fetches += [asyncio.create_task(asyncio.to_thread(ask, server, "GET", f"/{queue}/messages")) for queue in "dj"]
        free = [queue for queue in ("d", "j") if queue not in waits]
        await wait_until(lambda: len(backend.begun) == 1 + len(free), 50)
        # A call that is not a fetch waits for none.
        assert (await asyncio.to_thread(ask, server, "PUT", "/a"))[0] == 201
        assert sorted(backend.begun) == ["a", *free]
        backend.gate.set()
        assert {(await fetch)[0] for fetch in fetches} == {204}
        assert sorted(backend.begun) == ["a", "d", "j"]


def test_serve_takes_mq_s_workers_from_the_command_line_and_its_own_table_alone(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.qworker]\nworkers = '2:8'\n")
    process = spawn(
        "serve", f"mq://{tmp_path}/root", "--port", "0", "--workers", "8", QWORKER_WORKERS="2:8", cwd=tmp_path
    )
    try:
        assert process.stderr is not None
        make_queue(process.stderr.readline().decode())
        process.send_signal(signal.SIGTERM)
    finally:
        assert ended(process) == 0
