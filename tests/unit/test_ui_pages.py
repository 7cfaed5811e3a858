"""Workers, activity and searches in the dashboard, on every store that can do everything."""

from __future__ import annotations

import asyncio
import html
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from qworker import Draft
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.message import Message, State, StoredMessage
from qworker.sampling import WorkerSeen
from qworker.testing import wait_until
from qworker.tools.workers import join_workers
from qworker.ui.pages import lists
from qworker.ui.scans import Busy, Scans
from tests.support.dashboards import CALL, fill_store, watched
from tests.support.servers import RedisServer, free_port

pytestmark = pytest.mark.usefixtures("patient_dashboards")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest_asyncio.fixture(params=["memory", "file", "redis"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """A filled store of each kind."""
    url = f"memory://ui-{secrets.token_hex(4)}" if request.param == "memory" else f"file://{tmp_path}/spool?sync=off"
    if request.param == "redis":
        url = f"redis://127.0.0.1:{request.getfixturevalue('redis').port}/0"
    opened = open_backend(url)
    await opened.open()
    await fill_store(opened)
    yield opened
    for queue in await opened.queues():
        await opened.delete(queue)
    await opened.aclose()


def ids(page: httpx.Response) -> list[str]:
    return re.findall(r'<tr id="m-([^"]+)"', page.text)


def next_of(page: httpx.Response, text: str = "Continue") -> str | None:
    found = re.search(rf'href="([^"]+)">{text}', page.text)
    return None if found is None else html.unescape(found[1]).partition("#")[0]


async def test_workers_are_those_that_hold_messages_and_those_that_recorded_something(backend: Backend) -> None:
    async with watched(backend) as client:
        page = (await client.get("/workers")).text
        (holder,) = re.findall(r'<tr id="w-([^"]+)"', page)
        assert re.search(
            r'<tr id="r-m-1">.*?href="/m/mail/m-1".*?mail\.send.*?href="/q/mail\?state=leased"', page, re.S
        )
        assert html.unescape(holder) in html.unescape(page.partition("Running now")[2])
        # Those that record something while the dashboard looks.
        batches, _ = await backend.history.read_back((await backend.history.logs())[0], None, 1)
        backend.history.append(batches)

        async def seen() -> bool:
            return 'id="w-web1-4242"' in (await client.get("/workers")).text

        assert await wait_until(seen)


def test_a_holder_is_a_worker_of_the_history_only_if_no_other_could_be_it() -> None:
    def lease(holder: str | None) -> StoredMessage:
        return StoredMessage(message=Message(id="m", queue="mail", body=b""), state=State.LEASED, holder=holder)

    seen = [
        WorkerSeen("queue-worker-7f.example-41", ["mail"], 9.0),
        WorkerSeen("pods-of-app-a-1", ["mail"], 9.0),
        WorkerSeen("pods-of-app-b-1", ["mail"], 9.0),
        WorkerSeen("idle-7", ["other"], 8.0),
    ]
    holders = ["queue-work-41-0a1b2c3d-a1b2c3", "pods-of-ap-1-0a1b2c3d-a1b2c3", "cache:9:0a1b", "7-0a1b2c3d4e5f", None]
    found = join_workers(seen, {"jobs": [lease(holder) for holder in holders]})
    assert {worker.name: (worker.host, worker.pid, worker.queues, len(worker.running)) for worker in found} == {
        "queue-worker-7f.example-41": ("queue-worker-7f.example", 41, ["jobs", "mail"], 1),
        "pods-of-app-a-1": ("pods-of-app-a", 1, ["mail"], 0),
        "pods-of-app-b-1": ("pods-of-app-b", 1, ["mail"], 0),
        "pods-of-ap-1-0a1b2c3d-a1b2c3": ("pods-of-ap", 1, ["jobs"], 1),
        "cache:9:0a1b": ("cache", 9, ["jobs"], 1),
        "7-0a1b2c3d4e5f": (None, None, ["jobs"], 1),
        "": (None, None, ["jobs"], 1),
        "idle-7": ("idle", 7, ["other"], 0),
    }


async def test_activity_is_searched_by_its_fields_and_continues_where_it_ended(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qworker.ui.pages.activity._MOST_EVENTS", 2)
    async with watched(backend) as client:
        found: list[str] = []
        path: str | None = "/activity?queue=mail&event=retried&error=REFUSED"
        while path is not None:
            page = await client.get(path)
            found += re.findall(r'href="/m/mail/(old-\d)"', page.text)
            path = next_of(page)
        assert found == ["old-4", "old-2", "old-0"]
        assert "data-live" not in page.text
        assert "Nothing else that matches" in (await client.get("/activity?worker=absent")).text
        assert (await client.get("/activity?event=lost%20and%20found")).status_code == 400
        assert (await client.get("/activity?cursor=x")).status_code == 400


async def test_messages_are_searched_by_their_text_and_the_page_says_how_far(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.publish("mail", [Draft(body=CALL.replace(b"a@", b"b@"), id="other")])
    monkeypatch.setattr(lists, "MOST_SCANNED", 2)
    async with watched(backend) as client:
        page = await client.get("/q/mail?text=B%40EXAMPLE")
        assert ids(page) == []
        assert re.search(r"Searched 2\s+of about 4\s", page.text)
        assert "data-live" not in page.text
        path = next_of(page)
        while path is not None and not ids(page):
            page = await client.get(path)
            path = next_of(page)
        assert ids(page) == ["other"]
        failed = await client.get("/q/mail?state=failed&order=newest&task=mail.send&error=host%207&since=2h")
        assert ids(failed) == ["m-0"]
        assert ids(await client.get("/q/mail?state=failed&task=absent")) == []
        refused = await client.get("/q/mail?error=host")
        assert (refused.status_code, "need the state failed" in refused.text) == (400, True)


async def test_viewers_cannot_find_secrets_by_their_text(backend: Backend) -> None:
    for role, found in (("admin", ["m-2", "m-3", "m-4"]), ("viewer", [])):
        async with watched(backend, role=role) as client:
            assert sorted(ids(await client.get("/q/mail?text=k-123"))) == found


async def test_a_user_searches_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qworker.ui.scans._PATIENCE_S", 0.01)
    scans, ended = Scans(), asyncio.Event()

    async def search(user: str) -> None:
        async with scans.next(user):
            await ended.wait()

    first = asyncio.create_task(search("ada"))
    await asyncio.sleep(0)
    with pytest.raises(Busy, match="another search of yours"):
        await search("ada")
    other = asyncio.create_task(search("bob"))
    ended.set()
    await asyncio.gather(first, other, search("ada"))


@pytest.mark.parametrize("path", ["/workers", "/activity", "/q/mail?text=x", "/failures", "/schedules"])
async def test_a_page_of_a_store_that_is_down_says_so(path: str) -> None:
    async with watched(None) as client:
        page = await client.get(path)
        assert "connection refused" in page.text
        assert page.status_code in {200, 503}
