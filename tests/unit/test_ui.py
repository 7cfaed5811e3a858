"""The dashboard over HTTP: who gets which page, what hostile texts become, and that every link works."""

from __future__ import annotations

import asyncio
import hashlib
import html
import importlib.resources
import re
import secrets
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from qworker import Draft, Tasks
from qworker.asgi.limits import limited_protocol
from qworker.asgi.server import Server, bind
from qworker.backend import Backend
from qworker.backend.offers import QueueCount
from qworker.backend.registry import open_backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable, UsageError
from qworker.message import QueueStats, SettleAction, Settlement
from qworker.sampling import Counted, QueueSnapshot, RingSample, counting
from qworker.server.app import create_app
from qworker.testing import FakeClock
from qworker.ui import dashboard
from qworker.ui.access import LINK_S, SESSION_S, Access, Login, Secrets
from qworker.ui.app import Dashboard, below
from qworker.ui.looks import Looks
from qworker.ui.problems import problems_of
from qworker.ui.text import DASH, age, with_code, without_ages
from qworker.ui.watch import Watch
from qworker_memory import MemoryBackend
from tests.support.processes import PYTHON

pytestmark = pytest.mark.usefixtures("patient_dashboards")

FIXTURES = Path(__file__).parents[1] / "fixtures"
CALL = b'{"task":"mail","args":["a@example.org"],"kwargs":{"api_key":"k-123","deep":[{"Password":"hunter2"}]}}'
HOSTILE = (
    b"<script>document.title='owned'</script><img src=x onerror=alert(1)>\x1b[31m\xe2\x80\xae",
    b'{"task":"<svg onload=alert(2)>","args":["</pre></code><script>alert(3)</script>"],"kwargs":{"\\"><b id=x>":1}}',
    b'{"task":"{{ 7*7 }}","args":["javascript:alert(4)"]}',
    b"\x00\xff\xfe",
)
ERROR = "Traceback (most recent call last):\n  <script>alert(5)</script>\nValueError: <b>bold</b>"


@asynccontextmanager
async def store() -> AsyncGenerator[Backend]:
    backend = MemoryBackend(f"ui-{secrets.token_hex(4)}")
    await backend.open()
    yield backend
    await backend.aclose()


@asynccontextmanager
async def opened_backend(url: str) -> AsyncGenerator[Backend]:
    backend = open_backend(url)
    await backend.open()
    yield backend
    await backend.aclose()


@asynccontextmanager
async def served(
    backend: Backend | None,
    *,
    root: str = "",
    role: Any = "admin",
    clock: Clock = SYSTEM_CLOCK,
    **options: Any,
) -> AsyncGenerator[httpx.AsyncClient]:
    """Serve a dashboard to somebody who is logged in, unless there are other options."""

    async def opened() -> Backend:
        if backend is None:
            raise BackendUnavailable("connection refused")
        return backend

    def known(_request: Request) -> Access:
        return Access("test", role)

    options = options or {"authorize": known}
    dashboard = Dashboard(Watch(opened, clock=clock), **options)
    listener, ended = bind("127.0.0.1", 0), asyncio.Event()
    app = below(dashboard, root)
    server = asyncio.create_task(Server(app, limited_protocol()).serve_until(ended, listener))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        ended.set()
        await server
        await dashboard.aclose()


async def fill(backend: Backend) -> None:
    """One message in each state, and hostile ones."""
    await backend.publish("mail", [Draft(body=CALL, id="first"), Draft(body=CALL, id="later", delay=3600)])
    await backend.publish("odd", [Draft(body=body, id=f"odd-{number}") for number, body in enumerate(HOSTILE)])
    lease = (await backend.lease("odd", 1, 60))[0]
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=ERROR)])


# -- who gets a page ---------------------------------------------------------------------------------------------------


async def test_a_login_link_works_once_and_its_session_opens_the_page_that_was_asked_for() -> None:
    login = Login(Secrets())
    async with store() as backend, served(backend, login=login) as client:
        asked = await client.get("/q/mail?state=failed")
        assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=%2Fq%2Fmail%3Fstate%3Dfailed")
        link = {"t": login.new_link(), "next": "/q/mail?state=failed"}
        answer = await client.get("/login", params=link)
        assert (answer.status_code, answer.headers["location"]) == (303, "/q/mail?state=failed")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert (await client.get("/")).status_code == 200
        client.cookies.clear()
        assert (await client.get("/login", params=link)).status_code == 403
        assert (await client.get("/")).status_code == 303


async def test_only_a_token_logs_in_and_its_role_counts() -> None:
    login = Login(Secrets(admin="admin-token", viewer="viewer-token"))
    async with store() as backend, served(backend, login=login) as client:
        await fill(backend)
        for token, seen in (("admin-token", True), ("viewer-token", False)):
            page = await client.get("/m/mail/first", headers={"authorization": f"Bearer {token}"})
            assert ("k-123" in page.text, "hunter2" in page.text) == (seen, seen)
        own = {"origin": str(client.base_url)}
        wrong = await client.post("/login", data={"token": "another-token"}, headers=own)
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (403, False)
        right = await client.post("/login", data={"token": "viewer-token", "next": "//evil.example"}, headers=own)
        assert (right.status_code, right.headers["location"]) == (303, "/")
        assert (await client.get("/m/mail/first/body")).status_code == 403
        await client.post("/logout", headers=own)
        assert (await client.get("/")).status_code == 303


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("GET", {"host": "evil.example"}, 421),
        ("GET", {"host": "queues.example:8081"}, 200),
        ("GET", {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, 200),
        ("POST", {}, 403),
        ("POST", {"origin": "http://evil.example"}, 403),
        ("POST", {"origin": "null"}, 403),
        ("POST", {"sec-fetch-site": "same-site"}, 403),
        ("POST", {"sec-fetch-site": "cross-site", "origin": "http://localhost"}, 403),
        ("POST", {"sec-fetch-site": "same-origin"}, 303),
        ("POST", {"host": "localhost", "origin": "http://localhost"}, 303),
        ("POST", {"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)
async def test_no_page_of_another_site_changes_anything_here(method: str, headers: dict[str, str], status: int) -> None:
    login = Login(Secrets(admin="admin-token"))
    async with store() as backend, served(backend, login=login, hosts={"queues.example"}) as client:
        data = {"token": "admin-token"} if method == "POST" else None
        assert (await client.request(method, "/login", headers=headers, data=data)).status_code == status


async def test_who_may_not_see_a_mounted_dashboard_gets_404_without_a_hint() -> None:
    def nobody(_request: Request) -> None:
        return None

    async with store() as backend, served(backend, authorize=nobody) as client:
        answers = [await client.get(path) for path in ("/", "/q/mail", "/login", "/absent")]
        assert {(one.status_code, one.text) for one in answers} == {(404, "Not Found")}


def test_sessions_and_links_end_and_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    login, other = Login(Secrets(signing="a-shared-secret")), Login(Secrets(signing="a-shared-secret"))
    session, link = login.new_session(Access("ada", "operator")), login.new_link()
    assert other.use_session(session) == Access("ada", "operator")
    assert Login(Secrets(signing="another-secret")).use_session(session) is None
    assert Login(Secrets(signing="a-shared-secret", admin="new-token")).use_session(session) is None
    assert login.use_session(link) is None
    assert login.use_link(session) is None
    now = time.time()
    monkeypatch.setattr("itsdangerous.timed.time.time", lambda: now + LINK_S + 2)
    assert login.use_link(link) is None
    monkeypatch.setattr("itsdangerous.timed.time.time", lambda: now + SESSION_S + 2)
    assert login.use_session(session) is None


def test_tokens_that_would_give_viewers_everything_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWORKER_UI_TOKEN", "the-same-token")
    monkeypatch.setenv("QWORKER_UI_VIEW_TOKEN", "the-same-token")
    with pytest.raises(UsageError, match="must differ"):
        Secrets.from_environment()
    monkeypatch.setenv("QWORKER_UI_TOKEN", "short")
    with pytest.raises(UsageError, match="QWORKER_UI_TOKEN must have at least 8"):
        Secrets.from_environment()


# -- pages -------------------------------------------------------------------------------------------------------------


def links(page: httpx.Response) -> set[str]:
    """What can be opened: not the forms that change something."""
    read = re.sub(r'<form method="post".*?</form>', "", page.text, flags=re.DOTALL)
    found = re.findall(r'(?:href|src|action)="([^"]*)"', read)
    return {urljoin(str(page.url), html.unescape(one)).partition("#")[0] for one in found}


@pytest.mark.parametrize("root", ["", "/a/b"])
async def test_every_page_and_link_works_below_any_path(root: str) -> None:
    async with store() as backend, served(backend, root=root) as client:
        await fill(backend)
        seen: dict[str, int] = {}
        left = [f"{client.base_url}{root}/".replace("//", "/").replace(":/", "://", 1)]
        while left:
            url = left.pop()
            page = await client.get(url, follow_redirects=True)
            seen[url] = page.status_code
            assert urlsplit(url).path.startswith(f"{root}/")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            if page.headers["content-type"].startswith("text/html"):
                left += links(page) - seen.keys() - {*left}
        assert set(seen.values()) == {200}
        assert len(seen) > 20
        bare = await client.get(root or "/")
        assert (bare.status_code, bare.headers.get("location")) == ((308, f"{root}/") if root else (200, None))


async def test_texts_from_messages_are_shown_as_text() -> None:
    async with store() as backend, served(backend) as client:
        await fill(backend)
        pages = ["/q/odd", "/q/odd?state=failed", *(f"/m/odd/odd-{number}" for number in range(4))]
        pages += ["/workers", "/activity", "/q/odd?text=script", "/q/odd?task=%22%3E%3Cscript%3E"]
        for path in [
            *pages,
            "/?name=%3Cscript%3E",
            "/activity?queue=%22%3E%3Cscript%3E",
            "/q/%3Cscript%3E",
            "/q/odd?state=%3Cscript%3E",
        ]:
            page = await client.get(path)
            own = re.sub(r'<script src="/static/[0-9a-f]+/[a-z]+\.js" defer></script>', "", page.text)
            assert re.findall(r"<(?:script|img src=x|svg onload|b id|b>bold)", own) == []
            assert not {"\x1b", "\x00", "\u202e"} & {*page.text}
        assert "{{ 7*7 }}" in (await client.get("/m/odd/odd-2")).text
        body = await client.get("/m/odd/odd-1/body")
        assert body.content == HOSTILE[1]
        assert body.headers["content-type"] == "application/octet-stream"
        assert body.headers["content-disposition"].startswith("attachment")


async def test_a_page_tells_what_is_known_of_a_message() -> None:
    async with store() as backend, served(backend) as client:
        await fill(backend)
        later = (await client.get("/m/mail/later")).text
        assert "it is delayed, due in" in later
        failed = (await client.get("/m/odd/odd-0")).text
        assert "it failed permanently" in failed
        assert "ValueError: &lt;b&gt;bold&lt;/b&gt;" in failed


async def test_failures_are_grouped_and_a_group_has_its_messages() -> None:
    async with store() as backend, served(backend) as client:
        await backend.publish("mail", [Draft(body=CALL, id=f"m-{number}") for number in range(3)])
        leases = await backend.lease("mail", 3, 60)
        errors = ("OSError: host 7 refused", "OSError: host 8 refused", "ValueError: no")
        await backend.settle(
            [
                Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=error)
                for lease, error in zip(leases, errors, strict=True)
            ]
        )
        page = await client.get("/failures")
        rows = re.findall(
            r'<tr id="g-([0-9a-f]+)">.*?class="text">(.*?)</th>.*?class="number">(\d+)', page.text, re.DOTALL
        )
        assert [(error, count) for _, error, count in rows] == [
            ("OSError: host # refused", "2"),
            ("ValueError: no", "1"),
        ]
        assert re.findall(r'data-name="Last hour" class="number">(\d+)', page.text) == ["2", "1"]
        group = (await client.get(f"/failures/mail/{rows[0][0]}")).text
        assert {*re.findall(r"/m/mail/(m-\d)", group)} == {"m-0", "m-1"}
        assert f"--group {rows[0][0]}" in group
        assert (await client.get("/failures/mail/absent")).status_code == 404


async def test_an_id_is_found_in_any_queue() -> None:
    async with store() as backend, served(backend) as client:
        await fill(backend)
        await backend.publish("other", [Draft(body=CALL, id="first")])
        found = await client.get("/find", params={"id": " later "})
        assert (found.status_code, found.headers["location"]) == (303, "/m/mail/later")
        both = await client.get("/find", params={"id": "first"})
        assert {'href="/m/mail/first"', 'href="/m/other/first"'} <= {*re.findall(r'href="/m[^"]*"', both.text)}
        assert "No queue has a message" in (await client.get("/find", params={"id": "<b>absent"})).text


async def test_schedules_are_listed_with_their_next_tick() -> None:
    tasks = Tasks(f"memory://ui-{secrets.token_hex(4)}")

    @tasks.task(name="mail.clean", queue="mail")
    async def clean() -> None: ...

    await tasks.schedules.put("nightly", clean.call(), every=3600)
    async with served(await tasks.backend()) as client:
        page = (await client.get("/schedules")).text
    assert re.search(r'id="s-nightly".*?mail\.clean.*?<time datetime="20', page, re.DOTALL)
    await tasks.aclose()


async def test_the_first_page_shows_no_sum_of_a_queue_that_is_still_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each queue is counted by another process, for which the first page does not wait.
    monkeypatch.setattr(counting, "_MANY", 0)
    url = f"file://{tmp_path}/spool"
    async with opened_backend(url) as backend:
        await backend.publish("mail", [Draft(body=CALL)])

        async def opened() -> Backend:
            return backend

        shown = Dashboard(Watch(opened, url=lambda: url), authorize=lambda _: Access("test", "viewer"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(shown), base_url="http://127.0.0.1") as client:
            text = (await client.get("/")).text
            assert "<b>1</b> queue<" in text
            assert f"<b>{DASH}</b> waiting<" in text
            assert "keep no history" not in text
            async with asyncio.timeout(40):
                while "<b>1</b> waiting<" not in text:
                    await asyncio.sleep(0)
                    text = (await client.get("/")).text
        await shown.aclose()


async def test_dashes_have_a_reason_where_the_workers_keep_no_history(tmp_path: Path) -> None:
    async with opened_backend(f"file://{tmp_path}/spool?history=0") as backend, served(backend) as client:
        await backend.publish("mail", [Draft(body=CALL)])
        assert "keep no history" in (await client.get("/")).text


async def test_a_browser_loads_less_than_40_kilobytes_of_files_once_and_compressed() -> None:
    async with store() as backend, served(backend) as client:
        page = await client.get("/")
        assert "content-encoding" not in page.headers
        sizes = []
        for path in set(re.findall(r'"(/static/[^"]+)"', page.text)):
            file = await client.get(path, headers={"accept-encoding": "gzip"})
            plain = await client.get(path, headers={"accept-encoding": "identity"})
            assert (file.headers["content-encoding"], file.text) == ("gzip", plain.text)
            assert "content-encoding" not in plain.headers
            assert "immutable" in file.headers["cache-control"]
            sizes.append(file.num_bytes_downloaded)
    assert len(sizes) == 4
    assert sum(sizes) < 40_000


async def test_a_fragment_is_sent_again_only_if_it_has_changed() -> None:
    async with store() as backend, served(backend) as client:
        await backend.create("quiet")
        fragment = {"x-qworker-fragment": "1"}
        first = await client.get("/q/quiet", headers=fragment)
        assert first.text.lstrip().startswith('<main id="main"')
        again = await client.get("/q/quiet", headers={**fragment, "if-none-match": first.headers["etag"]})
        assert (again.status_code, again.text) == (304, "")
        other = await client.get("/", headers={**fragment, "if-none-match": first.headers["etag"]})
        assert other.status_code == 200


@pytest.mark.parametrize("path", ["/", "/q/mail", "/q/mail?state=delayed", "/q/odd?state=failed", "/failures"])
async def test_time_alone_changes_no_fragment(path: str) -> None:
    clock = FakeClock()
    async with store() as backend, served(backend, clock=clock) as client:
        await fill(backend)
        fragment = {"x-qworker-fragment": "1"}
        first = await client.get(path, headers=fragment)
        assert 'data-age="' in (await client.get(path)).text
        clock.advance(3.0)
        again = await client.get(path, headers={**fragment, "if-none-match": first.headers["etag"]})
        assert (again.status_code, again.text) == (304, "")


@pytest.mark.parametrize(
    ("at", "form", "text"),
    [
        (995.0, "{}", "5 s"),
        (880.0, "{} ago", "2 min ago"),
        (1001.0, "{} ago", "0 s ago"),
        (8200.0, "in {}", "in 2 h"),
        (999.0, "in {}", "in 0 s"),
        (None, "{} ago", DASH),
        (-1e300, "{}", f"{1e300 / 86_400:.0f} d"),
    ],
)
def test_an_age_is_said_in_whole_numbers(at: float | None, form: str, text: str) -> None:
    shown = str(age(at, 1000.0, form))
    assert re.sub("<[^>]*>", "", shown) == text
    assert re.sub("<[^>]*>", "", without_ages(shown)) == ("" if "<" in shown else text)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/absent", 404, "there is no such page"),
        ("/q/absent", 404, "there is no queue absent"),
        ("/m/mail/absent", 404, "has no message with this id"),
        ("/m/absent/one", 404, "absent"),
        ("/q/mail?state=lost", 400, "state must be one of"),
        ("/q/mail?range=2y", 400, "the range must be one of"),
        ("/q/mail?after=nowhere", 200, "The list cannot be read"),
        ("/?page=x", 400, "page must be a number"),
    ],
)
async def test_what_does_not_exist_is_said_in_one_line(path: str, status: int, text: str) -> None:
    async with store() as backend, served(backend) as client:
        await fill(backend)
        page = await client.get(path)
        assert page.status_code == status
        assert text in page.text
        assert "Traceback (most" not in page.text


async def test_a_store_that_does_not_answer_has_a_page() -> None:
    async with served(None) as client:
        page = await client.get("/")
        assert (page.status_code, "connection refused" in page.text) == (200, True)
        page = await client.get("/q/mail")
        assert (page.status_code, "connection refused" in page.text) == (503, True)


# -- in other applications ---------------------------------------------------------------------------------------------


async def test_an_application_mounts_the_dashboard_of_its_tasks_and_decides_who_sees_it() -> None:
    tasks = Tasks(f"memory://ui-{secrets.token_hex(4)}")

    @tasks.task(queue="mail")
    async def send(to: str) -> None: ...

    async def authorize(request: Request) -> Access | None:
        return Access("ada", "admin") if request.headers.get("x-user") == "ada" else None

    await send.using(id="one", delay=60).enqueue("a@example.org")
    mounted = dashboard(tasks, authorize=authorize)
    app = Starlette(routes=[Mount("/queues", mounted)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop.example") as client:
        assert (await client.get("/queues/")).status_code == 404
        page = await client.get("/queues/m/mail/one", headers={"x-user": "ada"})
        assert page.status_code == 200
        assert 'href="/queues/q/mail"' in page.text
        assert "it is delayed" in page.text
    await mounted.aclose()
    await tasks.aclose()


async def test_serve_has_the_dashboard_beside_the_queues_with_its_own_login() -> None:
    async with store() as backend:
        ui = Dashboard(Watch(lambda: _value(backend)), login=Login(Secrets(admin="admin-token")))
        app = create_app(backend, token="http-token", reaps=False)
        app.mount_ui(ui)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.get("/-/queues")).status_code == 401
            assert (await client.get("/-/ui")).headers["location"] == "/-/ui/"
            assert (await client.get("/-/ui/")).headers["location"] == "/-/ui/login"
            for token, status in (("http-token", 303), ("admin-token", 200)):
                page = await client.get("/-/ui/", headers={"authorization": f"Bearer {token}"})
                assert page.status_code == status
        await ui.aclose()


async def _value(backend: Backend) -> Backend:
    return backend


# -- reads with a budget and rules -------------------------------------------------------------------------------------


async def test_an_expensive_read_happens_less_often_and_all_viewers_share_it() -> None:
    clock, reads = FakeClock(), 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        clock.advance(1.0)
        return reads

    looks = Looks(clock=clock)
    assert [one.value for one in await asyncio.gather(*(looks.look("list", read) for _ in range(5)))] == [1] * 5
    clock.advance(48.0)
    assert (await looks.look("list", read)).value == 1
    clock.advance(2.0)
    # Nobody waits for it.
    assert (await looks.look("list", read)).value == 1
    await asyncio.sleep(0)
    assert (await looks.look("list", read)).value == 2
    await looks.aclose()


async def test_what_has_not_changed_is_not_read_again_and_is_as_fresh_as_now() -> None:
    clock, reads = FakeClock(), 0

    async def read() -> int:
        nonlocal reads
        reads += 1
        return reads

    looks, basis = Looks(clock=clock), object()
    for _ in range(3):
        clock.advance(10.0)
        found = await looks.look("list", read, basis=basis)
        assert (found.value, found.at) == (1, clock.time())
    assert (await looks.look("list", read, basis=object())).value == 2
    clock.advance(10.0)
    assert (await looks.look("list", read)).value == 3
    await looks.aclose()


async def test_a_page_after_a_change_shows_the_change_although_its_read_is_slow_or_had_begun_before() -> None:
    clock, stored, may_end = FakeClock(), "old", asyncio.Event()

    async def read() -> str:
        found = stored
        clock.advance(1.0)
        await may_end.wait()
        return found

    looks, basis = Looks(clock=clock), object()
    may_end.set()
    assert (await looks.look("list", read, basis=basis)).value == "old"
    stored = "new"
    looks.expire()
    assert (await looks.look("list", read, basis=basis)).value == "new"
    clock.advance(100.0)
    may_end.clear()
    assert (await looks.look("list", read)).value == "new"
    await asyncio.sleep(0)
    # The read has begun.
    stored = "newest"
    looks.expire()
    asyncio.get_running_loop().call_soon(may_end.set)
    assert (await looks.look("list", read)).value == "newest"
    await looks.aclose()


async def test_a_read_that_fails_keeps_what_was_seen_and_says_why() -> None:
    clock = FakeClock()
    answers: list[Callable[[], int]] = [lambda: 7]

    async def read() -> int:
        if not answers:
            raise BackendUnavailable("connection refused")
        return answers.pop()()

    looks = Looks(clock=clock)
    first = await looks.look("list", read)
    clock.advance(2.0)
    second = await looks.look("list", read)
    assert (second.value, second.at, second.problem) == (7, first.at, "connection refused")


def test_problems_follow_fixed_rules() -> None:
    def sample(*, ready: int = 0, paused: bool = False, problem: str | None = None) -> QueueSnapshot:
        stats = QueueStats(queue="mail", ready=ready, paused=paused)
        counted = Counted(at=1000.0, count=QueueCount(stats=stats))
        return QueueSnapshot(queue="mail", counted=counted, problem=problem)

    past = [RingSample(at=990.0, acked=80, failures=11), RingSample(at=100.0, failures=1000)]
    found = {
        "calm": problems_of(sample(), [past[1]], None, 1000.0),
        "paused": problems_of(sample(ready=3, paused=True), [], 900.0, 1000.0),
        "not yet": problems_of(sample(ready=3), [], 950.0, 1000.0),
        "no worker": problems_of(sample(ready=3), [], 700.0, 1000.0),
        "unusable": problems_of(sample(problem="permission denied"), [], None, 1000.0),
        "failures": problems_of(sample(), past, None, 1000.0),
    }
    assert {name: [one.line(1000.0) for one in problems] for name, problems in found.items()} == {
        "calm": [],
        "paused": ["paused, 3 waiting"],
        "not yet": [],
        "no worker": ["3 waiting, no worker for 5 min"],
        "unusable": ["permission denied"],
        "failures": ["11 failures in 10 min"],
    }


def test_what_stands_in_backticks_is_code_and_never_markup() -> None:
    assert with_code("`qworker <b>` runs it") == "<code>qworker &lt;b&gt;</code> runs it"
    assert with_code("one ` <i>") == "one ` &lt;i&gt;"


def test_the_first_page_of_a_mounted_dashboard_imports_no_backend() -> None:
    code = "import sys; from qworker import Tasks; from qworker.ui import dashboard; dashboard(Tasks('file://./spool'))"
    code += "; dashboard(Tasks()); dashboard(Tasks('nothing://here')); assert 'qworker_file.backend' in sys.modules"
    assert subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("folder", "names"),
    [(importlib.resources.files("qworker.ui") / "static", {"idiomorph.js"}), (FIXTURES / "axe", {"axe.min.js"})],
)
def test_files_of_others_are_those_that_the_table_names(folder: Traversable, names: set[str]) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|.* `([0-9a-f]{64})` \|", (folder / "VENDORED.md").read_text(), re.MULTILINE)
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name, _ in rows} == dict(rows)
    assert {name for name, _ in rows} == names
