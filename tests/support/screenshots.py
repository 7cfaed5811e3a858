"""Pictures of the dashboard for the documentation, from the store of `qworker demo --ui` (`make screenshots`)."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from playwright.sync_api import Browser, Page

from tests.support.browser import open_browser
from tests.support.processes import started

FOLDER = Path(__file__).parents[2] / "docs" / "images"
# Per cent. Text stays sharp.
QUALITY = 82
# Milliseconds until the demo has something to show everywhere: a queue counts as one without a worker after a minute.
PATIENCE_MS = 150_000
DESK, PHONE = (1280, 800), (390, 844)

Scheme = Literal["light", "dark"]


class Scene(NamedTuple):
    """A page of the demo: its path, and the links on it that lead to what is shown."""

    name: str
    path: str
    links: tuple[str, ...] = ()


SCENES = (
    Scene("overview", "/"),
    Scene("queue", "/q/payments"),
    Scene("failures", "/failures"),
    Scene("group", "/failures", ("tr:has-text('ConnectionError') td a",)),
    Scene("message", "/failures", ("tr:has-text('ConnectionError') td a", "tbody th a")),
    Scene("schedules", "/schedules"),
    Scene("workers", "/workers"),
    Scene("activity", "/activity"),
    Scene("search", "/q/payments?state=failed&order=newest&filter=refused#messages"),
    Scene("confirmation", "/q/payments/requeue"),
)


def take(page: Page, name: str) -> int:
    """Write what a page shows, and return the size of the file."""
    session = page.context.new_cdp_session(page)
    shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    data = base64.b64decode(shot["data"])
    (FOLDER / f"dashboard-{name}.webp").write_bytes(data)
    return len(data)


def go_to(page: Page, url: str, scene: Scene) -> bool:
    """Open the page of a scene. False: this dashboard has no such page."""
    answer = page.goto(url + scene.path)
    if answer is None or answer.status != 200:
        return False
    for link in scene.links:
        page.locator(link).first.click()
        page.wait_for_load_state()
    page.evaluate("document.activeElement.blur()")
    return True


def wait_for_traffic(page: Page, url: str) -> None:
    page.goto(url)
    for text in ("no worker", "done/s"):
        page.get_by_text(re.compile(text)).first.wait_for(timeout=PATIENCE_MS)


def show(browser: Browser, login: str, say: Callable[[str], None] = print) -> None:
    first = browser.new_context()
    page = first.new_page()
    page.goto(login)
    url = page.url.rstrip("/")
    wait_for_traffic(page, url)
    state = first.storage_state()
    FOLDER.mkdir(exist_ok=True)
    total = 0
    looks: tuple[tuple[str, Scheme, tuple[int, int]], ...] = (
        ("light", "light", DESK),
        ("dark", "dark", DESK),
        ("phone", "light", PHONE),
    )
    for look, scheme, (width, height) in looks:
        context = browser.new_context(
            storage_state=state,
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            timezone_id="UTC",
            locale="en-GB",
            reduced_motion="reduce",
        )
        page = context.new_page()
        for scene in SCENES:
            if go_to(page, url, scene):
                total += take(page, f"{scene.name}-{look}")
                say(f"{scene.name}-{look}")
        context.close()
    say(f"{total / 1e6:.2f} MB")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), "demo", "--ui", "--port", "0", env={"TMPDIR": folder}) as process,
        open_browser() as browser,
    ):
        show(browser, process.line("/login?t=").strip())
        process.drain()


if __name__ == "__main__":
    main()
