from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness


class TestFsq(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        async with Harness.fake(f"fsq://{tmp_path}/root") as harness:
            yield harness


class TestFsqHost(BackendContract):
    """A host's sub-queues are queues."""

    @pytest_asyncio.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        async with Harness.fake(f"fsq://{tmp_path}/root?host=web1&sync=off&keep_done=none") as harness:
            yield harness
