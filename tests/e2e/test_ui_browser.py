"""The dashboard in a browser: accessible, unimpressed by hostile texts, live, and usable by the keyboard alone."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect

from qworker import Draft
from qworker.backend import Backend
from qworker.backend.offers import samples_of
from qworker.backend.registry import open_backend
from qworker.cli.demo_past import Past, ring_of
from qworker.history.batch import EventBatch
from qworker.message import SettleAction, Settlement
from qworker.ui.text import age
from tests.support.browser import open_browser
from tests.support.processes import started

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.timeout(900)]

# What a message can bring. Each would run, load or break something if it were taken for markup.
HOSTILE = (
    "<script>window.owned = 1</script>",
    '"><img src=x onerror="window.owned = 1">',
    "' autofocus onfocus='window.owned = 1' x='",
    "</textarea></pre></title></style><svg onload=window.owned=1>",
    "javascript:window.owned=1",
    "{{ 7*7 }}{% raw %}",
    "\u202egnp.exe \x00\x1b[31m\ud800",
    "=cmd|' /C calc'!A0",
    "long" * 300,
)
# The messages that fail, each with one of them.
FAILED = [f"m-{n}" for n in range(len(HOSTILE))]
AXE = (Path(__file__).parents[1] / "fixtures" / "axe" / "axe.min.js").read_text()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
# Those that the width of a page can break. The tags above do not select them.
LAYOUT_RULES = ["target-size", "scrollable-region-focusable"]
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

# Elements and attributes that no template writes.
STRANGERS = r"""() => [...document.querySelectorAll("*")].filter((one) =>
  /^(iframe|object|embed|base|audio|video|style|frame)$/i.test(one.tagName) ||
  (/^(script|img|link)$/i.test(one.tagName) && !new URL(one.src || one.href).pathname.startsWith("/static/") &&
    !one.matches('head > link[rel="expect"][href="#end"]')) ||
  [...one.attributes].some(({ name, value }) =>
    name.startsWith("on") || name === "style" || name === "autofocus" || /^\s*javascript:/i.test(value))
).map((one) => one.outerHTML.slice(0, 300))"""
# What is wider than its place, unless it is there to be scrolled.
SIDEWAYS = """() => [document.scrollingElement, ...document.querySelectorAll("main *")].filter((one) =>
  one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 1 &&
  getComputedStyle(one).display !== "inline" && !one.closest("pre, svg, .numbers, .hidden")
).map((one) => `${one.tagName}.${one.className}: ${one.scrollWidth} > ${one.clientWidth}`)"""
WATCH = """
window.violations = [];
window.shift = 0;
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
// On a busy machine an update can come before the page is looked at. It brings what is new, and that may move.
const wasUpdated = (at) => performance.getEntriesByType("resource")
  .some((one) => one.initiatorType === "fetch" && one.startTime < at);
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput && !wasUpdated(one.startTime)) shift += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""


# The milliseconds of the first paint, and of the end of the HTML.
FIRST_PAINT = """() => new Promise((resolve) => new PerformanceObserver((list) => resolve([
  list.getEntries()[0].startTime, performance.getEntriesByType("navigation")[0].domInteractive
])).observe({ type: "paint", buffered: true }))"""


class Site(NamedTuple):
    """A dashboard, and what it was told about."""

    url: str
    store: str
    context: BrowserContext


class Visit(NamedTuple):
    """What was found on a page."""

    path: str
    axe: list[str]
    strangers: list[str]
    violations: list[str]
    sideways: list[str]
    shift: float


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    folder = tmp_path_factory.mktemp("ui")
    store = f"file://{folder}/spool?sync=off&keep_done=all"
    run_apart(fill(store))
    with started(folder, "ui", store, "--port", "0") as process:
        link = process.line("/login?t=").strip()
        context = browser.new_context(viewport=DESK, reduced_motion="reduce")
        context.add_init_script(WATCH)
        context.new_page().goto(link)
        parts = urlsplit(link)
        yield Site(f"{parts.scheme}://{parts.netloc}", store, context)
        context.close()
        assert process.drain() == 0


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run something asynchronous. Playwright has an event loop in this thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


async def fill(store: str) -> None:
    """Messages in every state with hostile texts, in a queue that has a past, and a paused one."""
    backend = open_backend(store)
    await backend.open()
    try:
        for queue in ("mail", "empty"):
            await backend.create(queue)
        await backend.pause("empty")
        await backend.publish("mail", [Draft(body=body, id=f"m-{n}") for n, body in enumerate(bodies())])
        await backend.publish("mail", [Draft(body=bodies()[0], id="later", delay=3600)])
        await settle(backend)
        past = ring_of("mail", Past(per_second=5, run_s=0.2, waiting=30, failed=0.1, retried=0.1), time.time())
        samples = samples_of(backend)
        assert samples is not None
        await samples.write("mail", 0, past)
    finally:
        await backend.aclose()


def bodies() -> list[bytes]:
    return [*map(call, HOSTILE), *(word.encode(errors="replace") for word in HOSTILE), b"\x00\xff\xfe"]


def call(word: str) -> bytes:
    text = word.encode(errors="replace").decode()
    return msgspec.json.encode({"task": text[:100], "args": [text], "kwargs": {text[:50]: {"password": text}}})


async def settle(backend: Backend) -> None:
    """Let some messages fail with hostile errors, some finish, some be retried, and one run."""
    leases = await backend.lease("mail", len(HOSTILE) + 4, 3600)
    actions = [
        Settlement(lease=lease, action=SettleAction.FAIL_PERM, error=f"Traceback\n  {word}\nOSError: {word}")
        for lease, word in zip(leases, HOSTILE, strict=False)
    ]
    actions += [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases[-4:-2]]
    actions += [Settlement(lease=leases[-2], action=SettleAction.FAIL_TMP, delay=3600, error=HOSTILE[0])]
    await backend.settle(actions)
    now = time.time()
    for lease, word in zip(leases, HOSTILE, strict=False):
        text = word.encode(errors="replace").decode()
        shared: dict[str, Any] = {"queue": "mail", "worker": text[:200], "id": [lease.message.id], "task": text[:200]}
        backend.history.append([EventBatch(kind="leased", at=now - 1, **shared)])
        backend.history.append([EventBatch(kind="failed", at=now, error=text[:2000], text=text, **shared)])


@contextmanager
def opened(site: Site, path: str = "/") -> Generator[Page]:
    page = site.context.new_page()
    try:
        page.goto(site.url + path)
        yield page
    finally:
        page.close()


# -- every page --------------------------------------------------------------------------------------------------------


def kind_of(path: str) -> tuple[object, ...]:
    """What pages have in common that differ only in what they are about. Failed messages have hostile texts each."""
    parts = urlsplit(path)
    first, *others = unquote(parts.path).strip("/").split("/")
    state = dict(parse_qsl(parts.query)).get("state", "")
    is_itself = first == "q" or (first == "m" and others[1] in FAILED)
    return first, len(others), state, others[-1] if is_itself else ""


@pytest.fixture(scope="module")
def visits(site: Site) -> list[Visit]:
    """A look at a page of each kind that links lead to: in the light, in the dark, and on a phone."""
    found: dict[tuple[object, ...], Visit] = {}
    left = ["/"]
    with opened(site) as page:
        page.on("dialog", lambda dialog: dialog.dismiss())
        while left:
            path = left.pop()
            if kind_of(path) not in found:
                visit = visit_page(page, site.url, path)
                found[kind_of(path)] = visit
                links = page.eval_on_selector_all(
                    "main a:not([download]), nav a", "(all) => all.map((one) => one.href)"
                )
                left += [link.removeprefix(site.url).partition("#")[0] for link in links if not link.endswith("/body")]
    assert len(found) > 12 + len(FAILED)
    return list(found.values())


def visit_page(page: Page, url: str, path: str) -> Visit:
    page.set_viewport_size(DESK)
    page.emulate_media(color_scheme="light")
    answer = page.goto(url + path)
    assert answer is not None
    assert answer.status == 200
    shift, strangers = page.evaluate("shift"), page.evaluate(STRANGERS)
    if page.evaluate("'owned' in window"):
        strangers.append("a script ran")
    violations = page.evaluate("violations")
    # The browser evaluates it, not the page, whose policy would forbid it.
    page.evaluate(AXE)
    problems = look(page, "light", {"runOnly": RULES})
    layout = {"runOnly": {"type": "rule", "values": LAYOUT_RULES}}
    problems += look(page, "desk", layout)
    page.emulate_media(color_scheme="dark")
    problems += look(page, "dark", {"runOnly": {"type": "rule", "values": ["color-contrast"]}})
    page.set_viewport_size(PHONE)
    problems += look(page, "phone", layout)
    return Visit(path, problems, strangers, violations, page.evaluate(SIDEWAYS), shift)


def look(page: Page, what: str, options: dict[str, Any]) -> list[str]:
    """The rules of accessibility that a page breaks."""
    result = page.evaluate("(options) => axe.run(options)", options)
    return [f"{what}: {one['id']}: {one['nodes'][0]['html'][:200]}" for one in result["violations"]]


def test_every_page_is_accessible_in_the_light_in_the_dark_and_on_a_phone(visits: list[Visit]) -> None:
    assert {visit.path: visit.axe for visit in visits if visit.axe} == {}


def test_no_text_of_a_message_becomes_part_of_a_page(visits: list[Visit]) -> None:
    assert {
        visit.path: visit.strangers + visit.violations for visit in visits if visit.strangers + visit.violations
    } == {}


def test_on_a_phone_nothing_but_code_scrolls_sideways(visits: list[Visit]) -> None:
    assert {visit.path: visit.sideways for visit in visits if visit.sideways} == {}


def test_nothing_moves_while_a_page_loads(visits: list[Visit]) -> None:
    assert {visit.path: visit.shift for visit in visits if visit.shift} == {}


def test_a_busy_browser_shows_no_part_of_a_page_before_it_has_read_all_of_it(site: Site) -> None:
    with opened(site) as page:
        site.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 20})
        for path in ("/activity", "/q/mail", "/"):
            page.goto(site.url + path)
            painted_at, read_at = page.evaluate(FIRST_PAINT)
            assert painted_at >= read_at, path


def test_every_page_works_without_a_script(browser: Browser, site: Site) -> None:
    state = site.context.storage_state()
    context = browser.new_context(storage_state=state, java_script_enabled=False)
    page = context.new_page()
    page.goto(site.url)
    page.get_by_role("link", name="mail", exact=True).click()
    page.get_by_label("States").get_by_role("link", name="Failed").click()
    page.locator("tbody th a").first.click()
    expect(page.get_by_role("heading", name="Story")).to_be_visible()
    page.get_by_label("Message id").fill("later")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{site.url}/m/mail/later")
    expect(page.get_by_role("link", name="Refresh")).to_be_visible()
    context.close()


# -- updates -----------------------------------------------------------------------------------------------------------


def is_update(request: Request) -> bool:
    return request.headers.get("x-qworker-fragment") == "1"


def test_seven_tabs_load_and_only_those_that_can_be_seen_ask_for_updates(site: Site) -> None:
    tabs = [site.context.new_page() for _ in range(7)]
    for tab in tabs:
        tab.clock.install()
        tab.goto(f"{site.url}/q/mail")
        expect(tab.locator("#live")).to_have_text("Live")
    asked: list[Request] = []

    def note(request: Request) -> None:
        asked.append(request)

    for tab in tabs:
        with tab.expect_request(is_update):
            tab.clock.fast_forward(2100)
        tab.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        tab.on("request", note)
        tab.clock.fast_forward(60_000)
    assert asked == []
    with tabs[0].expect_request(is_update):
        tabs[0].evaluate("delete document.hidden")
        tabs[0].evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        tabs[0].clock.fast_forward(1)
    for tab in tabs:
        tab.close()


def test_an_update_leaves_what_the_reader_works_with(site: Site) -> None:
    with opened(site, "/q/mail?state=delayed") as page:
        page.get_by_text("Numbers of the charts").click()
        row = page.locator("tr[id='m-later'] a")
        row.focus()
        run_apart(publish(site.store, Draft(body=b"x", id="new-one", delay=7200)))
        expect(page.locator("tr[id='m-new-one']")).to_be_visible()
        expect(row).to_be_focused()
        expect(page.locator("details.numbers")).to_have_attribute("open", "")
    with opened(site) as page:
        page.get_by_label("Part of a queue's name").fill("ma")
        with page.expect_response(lambda response: is_update(response.request)):
            pass
        expect(page.get_by_label("Part of a queue's name")).to_have_value("ma")


async def publish(store: str, draft: Draft) -> None:
    backend = open_backend(store)
    await backend.open()
    await backend.publish("mail", [draft])
    await backend.aclose()


def test_ages_grow_while_nothing_else_changes(site: Site) -> None:
    page = site.context.new_page()
    page.clock.install()
    page.goto(f"{site.url}/q/mail?state=delayed")
    due = page.locator("tr[id='m-later'] time")
    minutes = int(due.inner_text().split()[1])
    with page.expect_response(lambda response: is_update(response.request)):
        page.clock.fast_forward(600_000)
    expect(due).to_have_text(re.compile(f"^in ({minutes - 10}|{minutes - 11}) min$"))
    assert due.get_attribute("title") == due.get_attribute("datetime")
    page.close()


def test_the_script_says_an_age_as_the_page_does(site: Site) -> None:
    with opened(site) as page:
        for seconds in (0, 0.4, 5.2, 59, 61, 119.4, 121, 3601, 7199, 7201, 100_000, 172_799, 172_801, 1e7):
            said = re.sub("<[^>]*>", "", age(0.0, seconds))
            assert page.evaluate(f"ageText({seconds})") == said


# -- the keyboard ------------------------------------------------------------------------------------------------------


def expect_page(page: Page, url: str | re.Pattern[str]) -> None:
    """Wait for a page, and for its script, which hears the keys: the URL is there before it."""
    expect(page).to_have_url(url)
    page.wait_for_load_state()


def go(page: Page, key: str, url: str) -> None:
    """Press `g` and a key: again if there was more than the second and a half between them that there may be."""
    late = True
    while late:
        began = time.monotonic()
        page.keyboard.press("g")
        page.keyboard.press(key)
        late = time.monotonic() - began > 1.0
    expect_page(page, url)


def test_the_keyboard_alone_reaches_and_does_everything(site: Site) -> None:
    with opened(site) as page:
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("k")
        expect(page.locator("tbody tr a").first).to_be_focused()
        page.keyboard.press("Enter")
        expect_page(page, re.compile(r"/q/(mail|empty)$"))
        for link in page.locator("nav.pages a[data-key]").all():
            key, target = link.get_attribute("data-key"), link.get_attribute("href")
            go(page, str(key), f"{site.url}{target}")
        go(page, "o", f"{site.url}/")
        page.keyboard.press("Space")
        expect(page.locator("#live")).to_have_text("Paused")
        page.keyboard.press("Space")
        expect(page.locator("#live")).to_have_text("Live")
        page.keyboard.press("/")
        page.keyboard.type("j?later")
        assert page.get_by_label("Message id").input_value() == "j?later"


def test_the_keys_can_be_switched_off_and_times_shown_in_utc(browser: Browser, site: Site) -> None:
    state = site.context.storage_state()
    context = browser.new_context(storage_state=state, timezone_id="Asia/Kathmandu", viewport=DESK)
    page = context.new_page()
    page.goto(f"{site.url}/m/mail/later")
    shown = page.locator("time").first
    moment = str(shown.get_attribute("datetime"))
    assert not shown.inner_text().endswith("Z")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_label("Show times in UTC").check()
    page.get_by_label("Use these keys").uncheck()
    page.keyboard.press("Escape")
    assert shown.inner_text() == f"{moment[:10]} {moment[11:19]}Z"
    page.reload()
    assert shown.inner_text() == f"{moment[:10]} {moment[11:19]}Z"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_hidden()
    context.close()
