"""What watches a worker: it fails alone, and the end does not wait for it."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import watchfiles

from qworker.kit.task_groups import background_tasks
from qworker.supervisor.recycling import watch_sources
from qworker.supervisor.watcher import run_watcher
from tests.support.waiting import PATIENCE


async def fail() -> None:
    await asyncio.sleep(0)
    raise OSError("no watches are left")


async def test_a_watcher_that_fails_is_logged_at_once_and_ends_nothing_else():
    beats = asyncio.Queue[int]()

    async def beat() -> None:
        for number in range(100):
            await asyncio.sleep(0)
            beats.put_nowait(number)
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as logged:
        log: Any = structlog.get_logger()
        async with background_tasks(partial(run_watcher, fail, log), partial(run_watcher, beat, log)):
            async with asyncio.timeout(PATIENCE):
                while await beats.get() < 99:
                    pass
            assert [(entry["event"], entry["error"]) for entry in logged] == [
                ("watcher_failed", "OSError('no watches are left')")
            ]
    assert len(logged) == 1


async def test_a_cancelled_watcher_is_not_a_failed_one():
    with structlog.testing.capture_logs() as logged:
        async with background_tasks(partial(run_watcher, asyncio.Event().wait, structlog.get_logger())):
            await asyncio.sleep(0)
    assert logged == []


async def test_the_watcher_of_the_sources_reports_changes_and_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    # watchfiles looks for its own end every 5 s, which a machine that stands still can take too: longer, unless it is
    # told otherwise.
    look = int(2000 * PATIENCE)
    monkeypatch.setattr(watchfiles, "awatch", partial(watchfiles.awatch, rust_timeout=look))
    changed = asyncio.Event()
    reasons: list[str] = []

    def recycle(reason: str) -> None:
        reasons.append(reason)
        changed.set()

    loop = asyncio.get_running_loop()
    before = threading.active_count()
    async with background_tasks(partial(watch_sources, recycle)):
        async with asyncio.timeout(PATIENCE):
            # The watch begins in a thread.
            while not changed.is_set():
                (tmp_path / "app.py").write_text(f"x = {loop.time()}")
                try:
                    async with asyncio.timeout(0.5):
                        await changed.wait()
                except TimeoutError:
                    continue
        ended = loop.time()
    assert loop.time() - ended < PATIENCE
    assert reasons[0] == "changed: app.py"
    assert threading.active_count() <= before + 1
