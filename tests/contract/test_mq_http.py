from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from qworker.backend.registry import open_backend
from qworker.testing.clock import FakeClock
from qworker.testing.contract import BackendContract
from qworker.testing.harness import Harness
from tests.support.serving import served


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FakeClock]]:
    """A server on `memory:`, which takes its time from the harness's clock: nothing but the wire is under test."""
    clock = FakeClock()
    store = open_backend(f"memory://http-{secrets.token_hex(4)}", clock=clock)
    with served(store, reaps=False, body_limit=4 << 20) as running:
        yield f"mq+http://127.0.0.1:{running.port}", clock


class TestMqHttp(BackendContract):
    @pytest_asyncio.fixture
    async def harness(self, server: tuple[str, FakeClock]) -> AsyncIterator[Harness]:
        async with Harness(server[0], clock=server[1]) as harness:
            yield harness
