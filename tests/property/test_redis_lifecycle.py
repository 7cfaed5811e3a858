"""Redis does what the memory backend does, whatever happens in whatever order."""

from __future__ import annotations

import pytest

from qworker.testing.harness import Harness
from tests.property.lifecycle import check_lifecycle
from tests.support.servers import RedisHarness, RedisServer

pytestmark = pytest.mark.timeout(300)


def emptied(server: RedisServer) -> Harness:
    """The same server for every example."""
    with server.client() as client:
        client.flushall()
    return RedisHarness(server)


def test_redis_does_as_the_model() -> None:
    with RedisServer(stopped_clock=True) as server:
        check_lifecycle(lambda: emptied(server))
