from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness
from tests.servers import RedisHarness, RedisServer


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(moved_clock=True) as server:
        yield server


class TestRedis(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, server: RedisServer) -> AsyncIterator[Harness]:
        async with RedisHarness(server) as harness:
            yield harness
