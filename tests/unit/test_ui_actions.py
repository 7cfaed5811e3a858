"""What users change with the dashboard, by forms without JavaScript, on every store; and what nobody can change."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import structlog
from starlette.requests import Request

from qworker import Draft, Tasks
from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import BackendUnavailable
from qworker.failures import bulk
from qworker.message import Query, SettleAction, Settlement, State
from qworker.testing import wait_until
from qworker.ui.access import ROLES, Access, Login, Role, Secrets
from qworker.ui.app import Dashboard
from qworker.ui.audit import read_newest
from qworker.ui.tickets import TICKET_S
from qworker.ui.watch import Watch
from tests.support.forms import OWN, forms_of, submit
from tests.support.servers import RedisServer, free_port

QUEUE = "mail"


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture(params=["memory", "file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of each kind that can do everything."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        return f"redis://127.0.0.1:{server.port}/0?prefix=ui-{secrets.token_hex(4)}"
    return f"memory://ui-{secrets.token_hex(4)}" if request.param == "memory" else f"file://{tmp_path}/spool?sync=off"


def app_of(url: str) -> Tasks:
    tasks = Tasks(url)

    @tasks.task(name="send", queue=QUEUE)
    async def send(to: str, copies: int = 1) -> None: ...

    return tasks


@pytest_asyncio.fixture
async def tasks(url: str) -> AsyncIterator[Tasks]:
    tasks = app_of(url)
    yield tasks
    await tasks.aclose()


@pytest_asyncio.fixture
async def memory() -> AsyncIterator[Tasks]:
    tasks = app_of(f"memory://ui-{secrets.token_hex(4)}")
    yield tasks
    await tasks.aclose()


@asynccontextmanager
async def browsing(
    backend: Backend, *, role: Role = "admin", user: str = "ada", **options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """A browser that is logged in, unless there are other options."""

    async def opened() -> Backend:
        return backend

    def known(_request: Request) -> Access:
        return Access(user, role)

    options = {"authorize": known, **options} if "login" not in options else options
    dashboard = Dashboard(Watch(opened), **options)
    try:
        transport = httpx.ASGITransport(app=dashboard)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
    finally:
        await dashboard.aclose()


def call(to: str) -> bytes:
    return json.dumps({"task": "send", "args": [to]}).encode()


async def fail(backend: Backend, names: Sequence[str], error: str = "OSError: host 7 refused") -> None:
    """Failed messages, of which no other one is ready meanwhile."""
    await backend.publish(QUEUE, [Draft(body=call(name), id=name, task="send") for name in names])
    left = len(names)
    while left:
        leases = await backend.lease(QUEUE, left, 60.0)
        await backend.settle([Settlement(lease=one, action=SettleAction.FAIL_PERM, error=error) for one in leases])
        left -= len(leases)


async def ids(backend: Backend, state: State, queue: str = QUEUE) -> list[str]:
    return sorted(one.message.id for one in await list_messages(backend, queue, Query(state)))


async def everything(backend: Backend) -> list[Any]:
    """All that an action could change."""
    found: list[Any] = []
    for queue in await backend.queues():
        found.append((queue, (await backend.stats(queue)).paused))
        found += [(queue, state, await ids(backend, state, queue)) for state in State]
    return found


def shown(page: httpx.Response) -> str:
    """The result of an action, as the page after it shows it."""
    assert page.status_code == 200, page.text
    _, _, rest = page.text.partition('role="status">')
    return rest.partition("<")[0].strip()


# -- each action -------------------------------------------------------------------------------------------------------


async def test_an_operator_pauses_and_resumes_a_queue(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await fail(backend, ["a"])
    async with browsing(backend, role="operator") as client:
        page = await client.get(f"/q/{QUEUE}?state=failed")
        page = await submit(client, page, f"/q/{QUEUE}/pause")
        assert shown(page) == "mail is paused: nothing is leased from it until it is resumed."
        assert str(page.url).startswith("http://localhost/q/mail?state=failed&notice=")
        assert (await backend.stats(QUEUE)).paused
        page = await submit(client, page, f"/q/{QUEUE}/resume")
        assert shown(page) == "mail is resumed."
        assert not (await backend.stats(QUEUE)).paused


async def test_an_operator_requeues_and_cancels_a_message(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await fail(backend, ["a", "b"])
    async with browsing(backend, role="operator") as client:
        page = await client.get(f"/m/{QUEUE}/a")
        after = await submit(client, page, f"/m/{QUEUE}/a/requeue")
        assert shown(after) == "The message is ready again."
        assert (await ids(backend, State.READY), await ids(backend, State.FAILED)) == (["a"], ["b"])
        # The same form once more, as after a double click.
        assert shown(await submit(client, page, f"/m/{QUEUE}/a/requeue")) == "Nothing is changed: the message is ready."
        after = await submit(client, await client.get(f"/m/{QUEUE}/a"), f"/m/{QUEUE}/a/cancel")
        assert shown(after) == "The message is cancelled. It was waiting."
        assert (await ids(backend, State.READY), await ids(backend, State.FAILED)) == ([], ["a", "b"])
        assert {*forms_of(await client.get(f"/m/{QUEUE}/a"))} == {f"/m/{QUEUE}/a/requeue"}
    assert [(one.action, one.what, one.result, one.user) for one in await read_newest(backend, [QUEUE], 9)] == [
        ("cancel", "a", "done", "ada"),
        ("requeue", "a", "nothing", "ada"),
        ("requeue", "a", "done", "ada"),
    ]


async def test_an_operator_pauses_resumes_and_runs_a_schedule(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await tasks.schedules.put("every/hour", tasks["send"].call("a"), every=3600)
    async with browsing(backend, role="operator", tasks=tasks) as client:
        page = await client.get("/schedules")
        page = await submit(client, page, "/schedules/every%2Fhour/pause")
        assert shown(page) == "every/hour is paused: it does not tick until it is resumed."
        assert (await tasks.schedules.list())[0].paused
        page = await submit(client, page, "/schedules/every%2Fhour/resume")
        assert not (await tasks.schedules.list())[0].paused
        page = await submit(client, page, "/schedules/every%2Fhour/run")
        (enqueued,) = await ids(backend, State.READY)
        assert shown(page) == f"every/hour is enqueued: {enqueued}"
        assert f'<a href="/m/{QUEUE}/{enqueued}">' in page.text


async def test_an_admin_removes_a_message_after_a_confirmation(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await fail(backend, ["a", "b"])
    async with browsing(backend) as client:
        confirmation = await client.get(f"/m/{QUEUE}/a/remove")
        assert "Remove this message of mail?" in confirmation.text
        assert await ids(backend, State.FAILED) == ["a", "b"]
        page = await submit(client, confirmation, "/actions")
        await ended(client, page)
        assert await ids(backend, State.FAILED) == ["b"]


async def ended(client: httpx.AsyncClient, page: httpx.Response, state: str = "done") -> dict[str, Any]:
    """What an action has done, once it has ended."""

    async def look() -> dict[str, Any] | None:
        found = (await client.get(str(page.url), headers={"accept": "application/json"})).json()
        return None if found["state"] in {"running", "stopping"} else found

    found = await wait_until(look)
    assert isinstance(found, dict)
    assert found["state"] == state
    return found


async def test_many_are_requeued_as_they_were_confirmed_and_what_fails_later_is_left_alone(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await fail(backend, ["a", "b", "c"])
    await fail(backend, ["other"], "ValueError: no")
    await fail(backend, ["killer"], "code: poison\nthe handler's process died")
    async with browsing(backend, role="operator") as client:
        sent = await client.get(f"/q/{QUEUE}/requeue?error=refused", follow_redirects=True)
        assert "Requeue 3 failed messages of mail?" in sent.text
        everyone = await client.get(f"/q/{QUEUE}/requeue", follow_redirects=True)
        assert "Requeue 4 failed messages of mail?" in everyone.text
        assert "1 poison message is left out" in everyone.text
        await fail(backend, ["later"])
        done = await ended(client, await submit(client, sent, "/actions"))
        assert (done["changed"], done["left"], done["count"]) == (3, 0, 3)
        assert await ids(backend, State.READY) == ["a", "b", "c"]
        assert await ids(backend, State.FAILED) == ["killer", "later", "other"]
        # They fail again, and the same ticket is used again: it shows what it has done.
        leases = await backend.lease(QUEUE, 3, 60.0)
        again = [Settlement(lease=one, action=SettleAction.FAIL_PERM, error="OSError: refused") for one in leases]
        await backend.settle(again)
        assert await ended(client, await submit(client, sent, "/actions")) == done
        assert await ids(backend, State.READY) == []


async def test_many_are_removed_as_they_were_confirmed(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await fail(backend, ["a", "b", "c"])
    async with browsing(backend) as client:
        sent = await client.get(f"/q/{QUEUE}/remove?task=send", follow_redirects=True)
        assert "Remove 3 failed messages of mail?" in sent.text
        await fail(backend, ["later"])
        assert (await ended(client, await submit(client, sent, "/actions")))["changed"] == 3
        assert await ids(backend, State.FAILED) == ["later"]


async def test_a_queue_is_purged_only_with_its_name(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await backend.publish(QUEUE, [Draft(body=call("a"), id="a"), Draft(body=call("b"), id="b")])
    async with browsing(backend) as client:
        sent = await client.get(f"/q/{QUEUE}/purge?state=ready")
        assert "Purge 2 messages of mail?" in sent.text
        for typed in ("", "mails"):
            assert (await submit(client, sent, "/actions", typed=typed)).status_code == 400
        assert await ids(backend, State.READY) == ["a", "b"]
        assert (await ended(client, await submit(client, sent, "/actions", typed="mail")))["changed"] == 2
        assert await ids(backend, State.READY) == []


async def test_an_admin_enqueues_a_failed_call_with_other_arguments(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await fail(backend, ["a"])
    async with browsing(backend, tasks=tasks) as client:
        page = await client.get(f"/m/{QUEUE}/a/edit")
        assert json.loads(forms_of(page)[f"/m/{QUEUE}/a/edit"].values["arguments"]) == {"args": ["a"], "kwargs": {}}
        for text, problem in (
            ("[1]", "the arguments must be JSON"),
            ('{"args": ["a", 1, 2]}', "too many positional arguments"),
            ('{"args": ["a"], "kwargs": {"copies": "many"}}', "copies"),
        ):
            refused = await submit(client, page, f"/m/{QUEUE}/a/edit", arguments=text)
            assert refused.status_code == 422
            assert problem in refused.text
        edited = '{"args": ["b"], "kwargs": {"copies": 2}}'
        after = await submit(client, page, f"/m/{QUEUE}/a/edit", arguments=edited)
        assert shown(after) == "It is enqueued with these arguments: a:e1."
        (stored,) = await backend.find(QUEUE, ["a:e1"])
        assert json.loads(stored.message.body) == {
            "task": "send",
            "args": ["b"],
            "kwargs": {"copies": 2},
            "headers": {"qworker-edited": "a"},
        }
        assert await ids(backend, State.FAILED) == []
