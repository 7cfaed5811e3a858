"""The dashboard of a store that goes away and comes back: its last numbers are shown as such, and nothing restarts."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from qworker import Draft
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.testing.wait_until import wait_until
from qworker.ui import watch
from qworker.ui.access import Access
from qworker.ui.app import Dashboard
from qworker.ui.watch import Watch
from tests.support.servers import RedisServer


class Directory:
    """A directory that can be moved away."""

    def __init__(self, parent: Path) -> None:
        self._path, self._away = parent / "spool", parent / "away"
        self.url = f"file://{self._path}"

    def kill(self) -> None:
        self._path.rename(self._away)

    def start(self) -> None:
        self._away.rename(self._path)


class Server:
    """A server that can be killed."""

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self.kill: Callable[[], None] = lambda: server.stop(signal.SIGKILL)
        self.start = server.start


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Directory | Server:
    return Directory(tmp_path) if request.param == "file" else Server(request.getfixturevalue("server"))


@pytest_asyncio.fixture
async def backend(store: Directory | Server) -> AsyncIterator[Backend]:
    backend = open_backend(store.url)
    await backend.publish("mail", [Draft(body=b"x")])
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture
async def client(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(watch, "_EVERY_S", 0.05)
    monkeypatch.setattr(watch, "_SILENT_S", 0.2)

    async def opened() -> Backend:
        return backend

    dashboard = Dashboard(Watch(opened), authorize=lambda _request: Access("test", "admin"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(dashboard), base_url="http://localhost") as client:
        yield client
    await dashboard.aclose()


def waiting(page: httpx.Response) -> str:
    (found,) = re.findall(r"<dt>Waiting</dt><dd>\s*([0-9,]+)", page.text)
    return str(found)


async def seen_as(client: httpx.AsyncClient, status: int) -> httpx.Response:
    async def page() -> httpx.Response | None:
        found = await client.get("/q/mail")
        return found if found.status_code == status else None

    found = await wait_until(page)
    assert isinstance(found, httpx.Response)
    return found


async def test_the_last_numbers_are_shown_until_the_store_is_back(
    client: httpx.AsyncClient, store: Directory | Server, backend: Backend
) -> None:
    assert waiting(await seen_as(client, 200)) == "1"
    store.kill()
    down = await seen_as(client, 503)
    assert "The store does not answer" in down.text
    assert waiting(down) == "1"
    overview = await client.get("/")
    assert (overview.status_code, "The store does not answer" in overview.text) == (200, True)
    assert 'href="/q/mail"' in overview.text
    store.start()
    await backend.publish("mail", [Draft(body=b"x")])
    back = await seen_as(client, 200)
    assert "does not answer" not in back.text


@pytest.mark.parametrize("store", ["redis"], indirect=True)
async def test_a_store_that_hangs_is_said_not_to_answer(client: httpx.AsyncClient, server: RedisServer) -> None:
    await seen_as(client, 200)
    server.pause()
    try:
        assert "it has not answered for" in (await seen_as(client, 503)).text
    finally:
        server.go_on()
    await seen_as(client, 200)
