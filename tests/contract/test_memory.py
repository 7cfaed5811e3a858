from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness


class TestMemory(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self) -> AsyncIterator[Harness]:
        async with Harness.fake(f"memory://contract-{secrets.token_hex(4)}") as harness:
            yield harness
