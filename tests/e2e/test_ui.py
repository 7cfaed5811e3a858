"""`qworker ui` as a program: its link logs in, and a signal ends it."""

from __future__ import annotations

import asyncio
import html
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from qworker.testing import wait_until
from tests.support.waiting import PATIENCE


@asynccontextmanager
async def started(folder: Path, *options: str) -> AsyncGenerator[str]:
    """The link of a dashboard of a new store. A signal ends it without a failure."""
    (folder / "spool").mkdir()
    command = [sys.executable, "-m", "qworker", "ui", f"file://{folder}/spool", *options]
    # What it opens is kept.
    browser = folder / "browser"
    browser.write_text(f'#!/bin/sh\ncp "${{1#file://}}" {folder}/part && mv {folder}/part {folder}/opened.html\n')
    browser.chmod(0o700)
    environment = {**os.environ, "BROWSER": f"{browser} %s", "XDG_RUNTIME_DIR": str(folder)}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        link = ""
        while "/login?t=" not in link:
            link = (await process.stdout.readline()).decode().strip()
        yield link
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_the_link_is_printed_and_opened_and_logs_in(tmp_path: Path) -> None:
    async with started(tmp_path, "--port", "0", "--root-path", "/queues", "--open") as link:
        opened = tmp_path / "opened.html"
        assert await wait_until(opened.exists)
        assert f"url={html.escape(link)}" in opened.read_text()
        async with httpx.AsyncClient(follow_redirects=True, timeout=PATIENCE) as client:
            page = await client.get(link)
        assert page.status_code == 200
        assert page.url.path == "/queues/"
        assert f"file://{tmp_path}/spool" in page.text
    assert list(tmp_path.glob("qworker-ui-*")) == []


async def test_a_unix_socket_is_of_this_user_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "ui.sock"
    async with started(tmp_path, "--unix", str(path)) as link:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert re.fullmatch(r"http://localhost:8081/login\?t=\S+", link)
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, follow_redirects=True, timeout=PATIENCE) as client:
            assert (await client.get(link)).url.path == "/"
    assert not path.exists()
