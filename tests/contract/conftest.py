"""The contract suite on qworker's own backends: one file per backend.

For another backend write `test_<scheme>.py`:

    class TestRedis(BackendContract):
        @pytest_asyncio.fixture
        async def harness(self, redis_url):                 # a server that a session fixture started on a free port
            async with RedisHarness(redis_url, clock=None, tick=60.0) as harness:
                yield harness

A store with a clock of its own either really waits (`clock=None`, the default tick of 2 s), or its harness overrides
`advance` to set every stored time back by as many seconds, which is the same for the store and costs nothing; then give
it `tick=60.0`.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("qworker.testing")
