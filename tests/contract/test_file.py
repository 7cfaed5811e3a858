from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness


class TestFile(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        async with Harness.fake(f"file://{tmp_path}/root") as harness:
            yield harness


class TestFileUnsynced(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        async with Harness.fake(f"file://{tmp_path}/root?sync=off&keep_done=all") as harness:
            yield harness
