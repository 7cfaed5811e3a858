"""What the released mq server answered, and left in its directory, against ours."""

from __future__ import annotations

import http.client
import re
from pathlib import Path

import pytest

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Query, SettleAction, Settlement, State
from qworker.testing.clock import FakeClock
from tests.support.archives import unpack
from tests.support.serving import Served, served

FIXTURE = Path(__file__).parent.parent / "fixtures" / "mq.tar.gz"
LINE = re.compile(r"(GET|PUT|POST|PATCH|DELETE) ?(\S*) -> HTTP/1.1 (\d+) .*")
# Documented: the released server allows letters only in a queue's name, and its own documentation digits as well.
OURS = {("GET", "/queue001"): 404, ("PUT", "/queue001"): 201}


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    unpack(FIXTURE, tmp_path)
    return tmp_path / "mq"


def ask(server: Served, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=50)
    connection.request(method, path, body)
    response = connection.getresponse()
    response.body = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def test_the_released_server_s_transcript_is_answered_alike(unpacked: Path, tmp_path: Path) -> None:
    lines = [
        found.groups() for found in map(LINE.match, (unpacked / "transcript.txt").read_text().splitlines()) if found
    ]
    assert len(lines) > 15
    posted: list[str] = []
    fetched: list[str] = []
    with served(open_backend(f"mq://{tmp_path}/fresh?sync=off", remote_leases=True)) as server:
        for method, path, status in lines:
            # The transcript abbreviates the two.
            target = {"": "/alpha/messages", "one": f"/alpha/messages/{(fetched or posted or [''])[0]}"}.get(path, path)
            response = ask(server, method, target, b"body" if method in {"POST", "PUT"} else None)
            assert response.status == OURS.get((method, path), int(status)), (method, path)
            if response.status not in {200, 204}:
                assert response.headers["Content-Length"] == "0", (method, path)
            if method == "POST":
                posted.append(response.headers["X-Message-Id"])
            if response.status == 200 and not path:
                fetched.append(response.headers["X-Message-Id"])
                assert response.body == b"body"  # type: ignore[attr-defined]
    assert all(re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", i) for i in posted)
    assert fetched == posted[:2]


async def test_a_root_that_the_released_server_wrote_is_taken_over(unpacked: Path) -> None:
    root = unpacked / "root"
    clock = FakeClock()
    backend = open_backend(f"mq://{root}?delay=30", clock=clock)
    try:
        await backend.open()
        # One in queues/, two in new/; two in delay/ belong to consumers that may still come back.
        leases = await backend.lease("alpha", 10, 1000.0)
        assert [lease.message.body.strip() for lease in leases] == [b"body 4", b"body 5", b"body 6"]
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
        assert (await backend.reap("alpha")).returned == 0
        clock.advance(31.0)
        assert (await backend.reap("alpha")).returned == 2
        again = await backend.lease("alpha", 10, 1000.0)
        assert [lease.message.body.strip() for lease in again] == [b"body 1", b"body 2"]
        assert [lease.message.tries for lease in again] == [1, 1]
        assert len(await list_messages(backend, "alpha", Query(State.LEASED))) == 2
    finally:
        await backend.aclose()
    # The reaper takes what was there before it started, too.
    assert list((root / "remove").iterdir()) == []
