"""A store with no room for another lease, or nothing to give: a worker waits, and never spins."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing import wait_until


@pytest.fixture(params=["file", "fsq"])
async def backend(request, tmp_path: Path) -> AsyncIterator[Backend]:
    backend = open_backend(f"{request.param}://{tmp_path}/root?sync=off")
    await backend.create("q")
    await backend.publish("q", [Draft(body=b"x")] * 4)
    yield backend
    await backend.aclose()


@pytest.mark.parametrize("how", [SettleAction.ACK, SettleAction.FAIL_PERM, SettleAction.RELEASE])
async def test_a_full_store_waits_until_a_lease_ends(backend, how):
    backend._stores.store.most_held = 2
    held = await backend.lease("q", 10, 30.0)
    assert len(held) == 2
    # Longer than the test may take: only the end of a lease ends it.
    waiting = asyncio.create_task(backend.lease("q", 10, 30.0, 3600.0))
    await asyncio.wait([waiting], timeout=0.05)
    assert not waiting.done()
    assert await backend.settle([Settlement(lease=held[0], action=how, error="e")]) == []
    async with asyncio.timeout(30):
        assert len(await waiting) == 1


async def test_a_store_that_says_it_has_something_and_gives_nothing_does_not_keep_the_loop_busy(app, monkeypatch):
    turns = 0

    async def at_once(*_args: Any) -> list[Any]:
        nonlocal turns
        turns += 1
        if turns > 5000:
            # The loop has never turned: nothing else would end this.
            raise RuntimeError("it spins")
        return []

    @app.task
    async def work() -> None: ...

    for name in ("lease", "wait"):
        monkeypatch.setattr(app.store, name, at_once)
    async with app.working(queues=("a", "default")) as (worker, running):
        await wait_until(lambda: turns > 20)
        worker.drain()
        await running
    assert turns < 5000


async def test_a_store_without_room_says_so_once_and_cancels_a_lease_that_waits_for_room(backend):
    backend._stores.store.most_held = 2
    with structlog.testing.capture_logs() as logs:
        held = [*await backend.lease("q", 1, 30.0), *await backend.lease("q", 1, 30.0)]
        assert logs == []
        for _ in range(3):
            assert await backend.lease("q", 1, 30.0) == []
            waiting = asyncio.create_task(backend.lease("q", 1, 30.0, 3600.0))
            await asyncio.wait([waiting], timeout=0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    assert [(line["event"], line["log_level"], line["limit"]) for line in logs] == [
        ("concurrency_limited", "warning", 2)
    ]
    assert await backend.settle([Settlement(lease=held[0], action=SettleAction.ACK)]) == []
    assert len(await backend.lease("q", 9, 30.0)) == 1


async def test_a_missing_directory_of_an_fsq_queue_is_created_again(tmp_path):
    root = tmp_path / "root"
    backend = open_backend(f"fsq://{root}")
    try:
        await backend.create("q")
        await backend.aclose()
        shutil.rmtree(root / "q" / "tmp")
        await backend.publish("q", [Draft(body=b"x")])
        assert (root / "q" / "tmp").is_dir()
        assert len(await backend.lease("q", 1, 60.0)) == 1
    finally:
        await backend.aclose()
