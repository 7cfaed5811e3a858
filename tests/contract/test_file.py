from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness


class TestFile(BackendContract):
    @pytest_asyncio.fixture(params=["off", "full"])
    async def harness(self, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
        async with Harness.fake(f"file://{tmp_path}/spool?sync={request.param}") as harness:
            yield harness
