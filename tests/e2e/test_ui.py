"""`qworker ui` as a program: its link logs in, and a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx

from tests.support.waiting import PATIENCE


async def test_the_printed_link_logs_in_and_a_signal_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    command = [
        sys.executable,
        "-m",
        "qworker",
        "ui",
        f"file://{tmp_path}/spool",
        "--port",
        "0",
        "--root-path",
        "/queues",
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        link = ""
        while "/login?t=" not in link:
            link = (await process.stdout.readline()).decode().strip()
        async with httpx.AsyncClient(follow_redirects=True) as client:
            page = await client.get(link)
        assert page.status_code == 200
        assert page.url.path == "/queues/"
        assert f"file://{tmp_path}/spool" in page.text
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
