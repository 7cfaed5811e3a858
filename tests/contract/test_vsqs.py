from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness


class TestVsqs(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, tmp_path: Path) -> AsyncIterator[Harness]:
        async with Harness.fake(f"vsqs://{tmp_path}/store?history=1") as harness:
            yield harness
