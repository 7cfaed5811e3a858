"""Redis does what the memory backend does, whatever happens in whatever order."""

from __future__ import annotations

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from lifecycle import check_lifecycle

from qworker.testing.harness import Harness
from tests.servers import RedisServer

pytestmark = pytest.mark.timeout(300)


class RedisHarness(Harness):
    """A server whose clock only the test moves, emptied for each example."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.url, clock=None, tick=60.0)
        self._server = server
        with server.client() as client:
            client.flushall()

    async def advance(self, seconds: float) -> None:
        self._server.advance(seconds)


def test_redis_does_as_the_model() -> None:
    with RedisServer(stopped_clock=True) as server:
        check_lifecycle(lambda: RedisHarness(server))
