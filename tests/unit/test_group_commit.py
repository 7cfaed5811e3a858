"""The wait for a sync of a caller that is cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import uvloop

from qworker.kit.file_system import FileSystem
from qworker.kit.group_commit import GroupCommit
from tests.support.waiting import give_turns


@pytest.fixture
def stuck_sync(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let every sync wait until the event is set, as on a disk that hangs."""
    released = threading.Event()
    fsync = os.fsync

    def wait_and_sync(fd: int) -> None:
        assert released.wait(60)
        fsync(fd)

    monkeypatch.setattr("qworker.kit.group_commit.os.fsync", wait_and_sync)
    return released


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_cancelled_scope_waits_for_the_sync_without_spinning(
    tmp_path: Path, stuck_sync: threading.Event, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def test() -> tuple[int, bool]:
        directory = os.open(tmp_path, os.O_RDONLY)
        commit = GroupCommit(directory, FileSystem(directory))
        ended = False

        async def publish() -> None:
            nonlocal ended
            try:
                await commit.directories([directory])
            finally:
                ended = True

        async with anyio.create_task_group() as group:
            group.start_soon(publish)
            await give_turns(5)
            group.cancel_scope.cancel()
            (publishing,) = asyncio.all_tasks() - {asyncio.current_task()}
            with anyio.CancelScope(shield=True):
                await give_turns(100)
            cancels, early = publishing.cancelling(), ended
            stuck_sync.set()
        await commit.aclose()
        os.close(directory)
        assert ended
        return cancels, early

    with asyncio.Runner(loop_factory=new_loop) as runner:
        cancels, early = runner.run(test())
    assert not early, "the thread still used the descriptors"
    assert cancels <= 2
