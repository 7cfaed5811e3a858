"""What users change with the dashboard, by forms without JavaScript, on every store; and what nobody can change."""

from __future__ import annotations

import json
import secrets
import time
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
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable
from qworker.failures import bulk
from qworker.message import Query, SettleAction, Settlement, State
from qworker.testing import FakeClock, wait_until
from qworker.ui.access import ROLES, Access, Login, Role, Secrets
from qworker.ui.app import Dashboard
from qworker.ui.audit import read_newest
from qworker.ui.fragments import Fragment
from qworker.ui.tickets import TICKET_S
from qworker.ui.watch import Watch
from tests.support.forms import OWN, forms_of, submit
from tests.support.servers import RedisServer, free_port

pytestmark = pytest.mark.usefixtures("patient_dashboards")

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
        return f"redis://127.0.0.1:{server.port}/0"
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
    await (await tasks.backend()).delete(QUEUE)
    await tasks.aclose()


@pytest_asyncio.fixture
async def memory() -> AsyncIterator[Tasks]:
    tasks = app_of(f"memory://ui-{secrets.token_hex(4)}")
    yield tasks
    await tasks.aclose()


@asynccontextmanager
async def browsing(
    backend: Backend, *, role: Role = "admin", user: str = "ada", clock: Clock = SYSTEM_CLOCK, **options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """A browser that is logged in, unless there are other options."""

    async def opened() -> Backend:
        return backend

    def known(_request: Request) -> Access:
        return Access(user, role)

    options = {"authorize": known, **options} if "login" not in options else options
    dashboard = Dashboard(Watch(opened, clock=clock), **options)
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


async def test_an_operator_runs_a_delayed_message_now(tasks: Tasks) -> None:
    backend = await tasks.backend()
    await backend.publish(QUEUE, [Draft(body=call(one), id=one, delay=3600, priority=3) for one in ("a", "b")])
    await backend.publish(QUEUE, [Draft(body=call("c"), task="send", delay=3600)])
    (created,) = {*await ids(backend, State.DELAYED)} - {"a", "b"}
    async with browsing(backend, role="operator") as client:
        for message_id in ("a", created):
            page = await client.get(f"/m/{QUEUE}/{message_id}")
            after = await submit(client, page, f"/m/{QUEUE}/{message_id}/run")
            assert shown(after) == "The message is due now."
            await wait_until(lambda: _reaped(backend))
            (lease,) = await backend.lease(QUEUE, 9, 60.0)
            assert (lease.message.id, lease.message.tries) == (message_id, 0)
            # It runs already.
            assert shown(await submit(client, page, f"/m/{QUEUE}/{message_id}/run")) == (
                "Nothing is changed: the message is leased."
            )
            await backend.settle([Settlement(lease=lease, action=SettleAction.ACK)])
        assert await ids(backend, State.DELAYED) == ["b"]


async def _reaped(backend: Backend) -> bool:
    await backend.reap(QUEUE)
    return (await backend.stats(QUEUE)).ready > 0


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
        assert page.status_code == 200, page.text
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


# -- tickets -----------------------------------------------------------------------------------------------------------


async def test_a_stopped_action_goes_on_with_the_same_ticket(memory: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_BATCH", 2)
    backend = await memory.backend()
    names = [f"m-{number}" for number in range(7)]
    await fail(backend, names)
    async with browsing(backend, role="operator") as client:
        sent = await client.get(f"/q/{QUEUE}/requeue", follow_redirects=True)
        form = forms_of(sent)["/actions"].values
        requeue, stopped = backend.requeue, list[httpx.Response]()

        async def stop_first(*args: Any) -> int:
            if not stopped:
                location = f"/actions/{(await client.post('/actions', data=form, headers=JSON)).json()['id']}"
                page = await client.get(location)
                assert ">Running<" in page.text
                stopped.append(await submit(client, page, f"{location}/stop"))
            return await requeue(*args)

        monkeypatch.setattr(backend, "requeue", stop_first)
        page = await submit(client, sent, "/actions")
        half = await ended(client, page, "stopped")
        assert (half["changed"], half["left"]) == (2, 5)
        assert len(await ids(backend, State.READY)) == 2
        page = await client.get(page.url)
        rest = await ended(client, await submit(client, page, "/actions"))
        assert (rest["changed"], rest["left"]) == (7, 0)
        assert await ids(backend, State.READY) == names
    record = (await read_newest(backend, [QUEUE], 9))[0]
    assert (record.action, record.count, record.result) == ("requeue many", 7, "done")
    assert record.filter.startswith("failed at ")


JSON = {**OWN, "accept": "application/json"}


async def test_a_ticket_is_of_one_user_one_store_and_ten_minutes(
    memory: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await memory.backend()
    other = await app_of(f"memory://ui-{secrets.token_hex(4)}").backend()
    await fail(backend, ["a"])
    await fail(other, ["a"])
    before = await everything(backend)
    monkeypatch.setenv("QWORKER_UI_SECRET", "the-same-secret")
    async with browsing(backend) as client:
        sent = await client.get(f"/q/{QUEUE}/remove", follow_redirects=True)
        form = forms_of(sent)["/actions"].values
        cut = {"ticket": form["ticket"][:-2]}
        for wrong in (cut, {"ticket": ""}, {}):
            assert (await client.post("/actions", data=wrong, headers=OWN)).status_code == 403
    async with browsing(backend, user="eve") as client:
        assert "another user" in (await client.post("/actions", data=form, headers=OWN)).text
    async with browsing(backend, role="operator") as client:
        assert "this needs the role admin" in (await client.post("/actions", data=form, headers=OWN)).text
    async with browsing(other) as client:
        assert "another store" in (await client.post("/actions", data=form, headers=OWN)).text
    with monkeypatch.context() as patched:
        patched.setenv("QWORKER_UI_SECRET", "another-secret")
        async with browsing(backend) as client:
            assert (await client.post("/actions", data=form, headers=OWN)).status_code == 403
    assert await everything(backend) == before
    async with browsing(backend) as client:
        late = time.time() + TICKET_S + 2
        with monkeypatch.context() as patched:
            patched.setattr("itsdangerous.timed.time.time", lambda: late)
            assert "older than 10 minutes" in (await client.post("/actions", data=form, headers=OWN)).text
        assert await everything(backend) == before
        # Another process takes it, as after a crash.
        assert (await client.post("/actions", data=form, headers=OWN)).status_code == 303
        await wait_until(lambda: _is_empty(backend))
    await other.aclose()


async def _is_empty(backend: Backend) -> bool:
    return await ids(backend, State.FAILED) == []


async def test_from_a_thousand_messages_on_the_name_is_typed(memory: Tasks) -> None:
    backend = await memory.backend()
    await fail(backend, [f"m-{number}" for number in range(1000)])
    async with browsing(backend, role="operator") as client:
        sent = await client.get(f"/q/{QUEUE}/requeue", follow_redirects=True)
        assert (await submit(client, sent, "/actions", typed="")).status_code == 400
        assert len(await ids(backend, State.FAILED)) == 1000
        assert (await ended(client, await submit(client, sent, "/actions", typed="mail")))["changed"] == 1000


# -- who may not -------------------------------------------------------------------------------------------------------

# The method and path of each route that changes something or asks for it, and the role that it needs.
ROUTES: dict[tuple[str, str], tuple[str, Role]] = {
    ("POST", "/q/{queue}/pause"): ("/q/mail/pause", "operator"),
    ("POST", "/q/{queue}/resume"): ("/q/mail/resume", "operator"),
    ("POST", "/m/{queue}/{id}/requeue"): ("/m/mail/a/requeue", "operator"),
    ("POST", "/m/{queue}/{id}/run"): ("/m/mail/later/run", "operator"),
    ("POST", "/m/{queue}/{id}/cancel"): ("/m/mail/ready/cancel", "operator"),
    ("POST", "/m/{queue}/{id}/edit"): ("/m/mail/a/edit", "admin"),
    ("POST", "/schedules/{name:path}/pause"): ("/schedules/hourly/pause", "operator"),
    ("POST", "/schedules/{name:path}/resume"): ("/schedules/hourly/resume", "operator"),
    ("POST", "/schedules/{name:path}/run"): ("/schedules/hourly/run", "operator"),
    ("POST", "/actions"): ("/actions", "admin"),
    ("POST", "/actions/{nonce}/stop"): ("/actions/0123456789abcdef/stop", "operator"),
    ("GET", "/q/{queue}/requeue"): ("/q/mail/requeue?until=", "operator"),
    ("GET", "/q/{queue}/remove"): ("/q/mail/remove?until=", "admin"),
    ("GET", "/q/{queue}/purge"): ("/q/mail/purge?state=ready", "admin"),
    ("GET", "/m/{queue}/{id}/remove"): ("/m/mail/a/remove", "admin"),
    ("GET", "/m/{queue}/{id}/edit"): ("/m/mail/a/edit", "admin"),
    ("GET", "/actions/{nonce}"): ("/actions/0123456789abcdef", "operator"),
}
# The headers of a request that must change nothing, whatever its form says.
FOREIGN: list[dict[str, str]] = [
    {},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://localhost"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:8082"},
    {"sec-fetch-site": "same-origin", "host": "evil.example"},
]


async def test_the_table_has_every_route_that_changes_something(memory: Tasks) -> None:
    routes = Dashboard(Watch(memory.backend), authorize=lambda _request: None, tasks=memory)._inner
    actions = {
        (method, route.path)
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
        if method != "GET" or getattr(route.endpoint, "__name__", "") == "checked"
    }
    assert actions == ROUTES.keys()


@pytest.fixture
def shared_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one dashboard has signed is valid in another one."""
    monkeypatch.setenv("QWORKER_UI_SECRET", "the-same-secret")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.usefixtures("shared_secret")
async def test_a_request_that_is_refused_changes_nothing(memory: Tasks, role: Role) -> None:
    backend = await memory.backend()
    await fail(backend, ["a"])
    await backend.publish(QUEUE, [Draft(body=call("ready"), id="ready"), Draft(body=b"", id="later", delay=3600)])
    await memory.schedules.put("hourly", memory["send"].call("a"), every=3600)
    before = await everything(backend), await memory.schedules.list()
    async with browsing(backend, role=role, hosts=(), tasks=memory) as client:
        page = await client.get("/")
        async with browsing(backend, tasks=memory) as admin:
            ticket = forms_of(await admin.get(f"/q/{QUEUE}/remove", follow_redirects=True))["/actions"].values
            (token,) = {form.values["token"] for form in forms_of(await admin.get(f"/q/{QUEUE}")).values()}
        form = {"token": token, **ticket, "arguments": '{"args": ["b"]}'}
        for (method, _), (path, needed) in ROUTES.items():
            allowed = ROLES.index(role) >= ROLES.index(needed)
            if method == "GET":
                found = await client.get(path, headers={"sec-fetch-site": "cross-site"})
                assert (found.status_code == 403) == (not allowed), (path, found.status_code)
                continue
            for headers in FOREIGN:
                found = await client.post(path, data=form, headers=headers)
                assert found.status_code in {403, 421}, (path, headers)
            wrong = {"token": f"{token}x", "arguments": form["arguments"]}
            for data in ({}, wrong, {"token": ticket["ticket"]}):
                found = await client.post(path, data=data, headers=OWN)
                assert found.status_code == 403, (path, data)
            if not allowed:
                assert (await client.post(path, data=form, headers=OWN)).status_code == 403, path
            for other in ("GET", "PUT", "DELETE", "PATCH"):
                if (other, path) not in {(each, real) for (each, _), (real, _) in ROUTES.items()}:
                    found = await client.request(other, path, headers=OWN)
                    assert found.status_code in {403, 404, 405}, (other, path)
        assert page.status_code == 200
    assert (await everything(backend), await memory.schedules.list()) == before


@pytest.mark.usefixtures("shared_secret")
async def test_a_read_only_dashboard_shows_no_action_and_refuses_each(memory: Tasks) -> None:
    backend = await memory.backend()
    await fail(backend, ["a"])
    await memory.schedules.put("hourly", memory["send"].call("a"), every=3600)
    before = await everything(backend)
    async with browsing(backend, tasks=memory) as admin:
        (token,) = {form.values["token"] for form in forms_of(await admin.get(f"/q/{QUEUE}")).values()}
    async with browsing(backend, tasks=memory, read_only=True) as client:
        for path in (f"/q/{QUEUE}?state=failed", f"/m/{QUEUE}/a", "/schedules"):
            page = await client.get(path)
            assert forms_of(page) == {}
            assert 'class="button"' not in page.text
        for (method, _), (path, _) in ROUTES.items():
            sent = await client.request(method, path, data={"token": token} if method == "POST" else None, headers=OWN)
            assert sent.status_code == 403, path
    assert await everything(backend) == before


@pytest.mark.parametrize("scheme", ["fsq", "vsqs", "sq", "mq"])
async def test_what_a_store_cannot_do_is_no_button(scheme: str, tmp_path: Path) -> None:
    backend = open_backend(f"{scheme}://{tmp_path}/spool")
    await backend.create(QUEUE)
    await backend.publish(QUEUE, [Draft(body=b"failed")])
    (lease,) = await backend.lease(QUEUE, 1, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error="no")])
    await backend.publish(QUEUE, [Draft(body=b"ready")])
    (ready,) = await list_messages(backend, QUEUE, Query(State.READY))
    async with browsing(backend) as client:
        page = await client.get(f"/m/{QUEUE}/{ready.message.id}")
        assert "cancel" in backend.deviations
        assert forms_of(page) == {}
        assert f'href="/m/{QUEUE}/{ready.message.id}/remove"' in page.text
        assert forms_of(await client.get("/schedules")) == {}
        refused = await client.get(f"/m/{QUEUE}/{ready.message.id}/edit")
        assert refused.status_code == 400
        sent = await client.get(f"/q/{QUEUE}/requeue", follow_redirects=True)
        assert "Requeue 1 failed message of mail?" in sent.text
        assert (await ended(client, await submit(client, sent, "/actions")))["changed"] == 1
    assert (await backend.stats(QUEUE)).ready == 2
    assert await read_newest(backend, [QUEUE], 9) == []
    await backend.aclose()


# -- programs ----------------------------------------------------------------------------------------------------------


async def test_a_program_changes_the_same_with_a_token_and_json(memory: Tasks) -> None:
    backend = await memory.backend()
    await fail(backend, ["a", "b"])
    login = Login(Secrets(admin="admin-token", viewer="viewer-token"))
    program = {"authorization": "Bearer admin-token", "accept": "application/json"}
    async with browsing(backend, login=login) as client:
        paused = await client.post(f"/q/{QUEUE}/pause", headers=program)
        assert paused.json() == {
            "changed": True,
            "text": "mail is paused: nothing is leased from it until it is resumed.",
            "link": None,
        }
        assert (await client.post(f"/m/{QUEUE}/a/requeue", headers=program)).json()["link"] == "/m/mail/a"
        asked = await client.get(f"/q/{QUEUE}/requeue", headers=program, follow_redirects=True)
        found = asked.json()
        assert (found["count"], found["examples"], found["typed"]) == (1, ["b"], False)
        begun = await client.post("/actions", json={"ticket": found["ticket"]}, headers=program)
        assert begun.status_code == 202

        async def has_ended() -> bool:
            answer = await client.get(f"/actions/{begun.json()['id']}", headers=program)
            return bool(answer.json()["state"] == "done")

        await wait_until(has_ended)
        assert await ids(backend, State.READY) == ["a", "b"]
        viewer = {**program, "authorization": "Bearer viewer-token"}
        refused = await client.post(f"/q/{QUEUE}/resume", headers=viewer)
        assert (refused.status_code, refused.json()) == (
            403,
            {"error": "this needs the role operator, and yours is viewer"},
        )
        # A cookie does not count if there is a token.
        session = login.new_session(Access("ada", "admin"))
        client.cookies.set("qworker_ui_0", session)
        assert (await client.post(f"/q/{QUEUE}/resume", headers=viewer)).status_code == 403
        wrong = {**program, "authorization": "Bearer wrong-token"}
        assert (await client.post(f"/q/{QUEUE}/resume", headers=wrong)).status_code == 401
        assert (await backend.stats(QUEUE)).paused


async def test_a_form_is_valid_in_its_own_session_only(memory: Tasks) -> None:
    backend = await memory.backend()
    await fail(backend, ["a"])
    login = Login(Secrets())
    async with browsing(backend, login=login) as client:
        tokens = []
        for user in ("ada", "eve"):
            client.cookies.clear()
            await client.get("/login", params={"t": login.new_link()})
            assert len(client.cookies) == 1
            tokens.append(forms_of(await client.get(f"/q/{QUEUE}"))[f"/q/{QUEUE}/pause"].values["token"])
            client.cookies.set(next(iter(client.cookies)), login.new_session(Access(user, "admin")))
        sent = await client.post(f"/q/{QUEUE}/pause", data={"token": tokens[0]}, headers=OWN)
        assert (sent.status_code, "not valid any more" in sent.text) == (403, True)
        assert not (await backend.stats(QUEUE)).paused


async def test_viewers_share_what_their_scripts_fetch_but_not_the_tokens_of_their_forms(memory: Tasks) -> None:
    login, fragment = Login(Secrets()), {"x-qworker-fragment": "1"}
    backend = await memory.backend()
    await fail(backend, ["a"])
    seen: list[httpx.Response] = []
    async with browsing(backend, login=login) as client:
        await client.get("/login", params={"t": login.new_link()})
        (cookie,) = client.cookies
        for user, action in (("ada", "pause"), ("eve", "resume")):
            client.cookies.set(cookie, login.new_session(Access(user, "admin")))
            seen.append(await client.get(f"/q/{QUEUE}", headers=fragment))
            await submit(client, seen[-1], f"/q/{QUEUE}/{action}")
    first, second = ({form.values["token"] for form in forms_of(page).values()} for page in seen)
    assert len(first) == len(second) == 1
    assert first != second


async def test_many_viewers_cost_one_rendering_a_second(memory: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = await memory.backend()
    await fail(backend, ["a"])
    rendered: list[str] = []
    of = Fragment.of

    def counted(text: str, *rest: Any) -> Fragment:
        rendered.append(text)
        return of(text, *rest)

    monkeypatch.setattr(Fragment, "of", counted)
    async with browsing(backend, clock=(clock := FakeClock())) as client:
        for _ in range(2):
            for _ in range(100):
                page = await client.get(f"/q/{QUEUE}", headers={"x-qworker-fragment": "1"})
            clock.advance(1.0)
    assert page.status_code == 200
    assert len(rendered) == 2


async def test_an_action_that_a_store_refuses_is_recorded(memory: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = await memory.backend()
    await fail(backend, ["a"])

    async def broken(*_args: Any) -> None:
        raise BackendUnavailable("it does not answer")

    async with browsing(backend) as client:
        page = await client.get(f"/q/{QUEUE}")
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
            patched.setattr(backend, "pause", broken)
            assert (await submit(client, page, f"/q/{QUEUE}/pause")).status_code == 503
            patched.setattr(backend, "cells", broken)
            assert (await submit(client, page, f"/q/{QUEUE}/pause")).status_code == 503
    told = [(one["action"], one["result"], one["not_recorded"]) for one in logs if one["event"] == "ui_action"]
    assert told == [("pause", "it does not answer", None), ("pause", "it does not answer", "it does not answer")]
    assert [one.result for one in await read_newest(backend, [QUEUE], 9)] == ["it does not answer"]
