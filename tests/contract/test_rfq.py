from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness
from tests.support.servers import MovedClock, RedisHarness, RedisServer, free_port


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[RedisServer, MovedClock]]:
    with RedisServer(port=free_port(), moved_clock=True) as server:
        yield server, MovedClock()


class TestRfq(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, server: tuple[RedisServer, MovedClock]) -> AsyncIterator[Harness]:
        redis, clock = server
        async with RedisHarness(redis, url=f"rfq://127.0.0.1:{redis.port}/0", moved=clock) as harness:
            yield harness
