"""A real browser without a window, the one of the system: Playwright drives it, and downloads none."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager

from playwright.sync_api import Browser, expect, sync_playwright

from tests.support.waiting import PATIENCE

__all__ = ["open_browser"]

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser() -> Generator[Browser]:
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    assert found is not None, f"no browser: install one of {', '.join(_NAMES)} (tests/install-tools.sh does)"
    options = ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    # By default 5 s, in which a browser on a busy machine may show nothing.
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=options, chromium_sandbox=False)
        try:
            yield browser
        finally:
            browser.close()
