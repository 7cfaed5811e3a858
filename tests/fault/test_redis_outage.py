"""A Redis that is killed again and again under load: how soon workers work again, and what is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.fault.redis_load import under_load
from tests.support.depth import DEEP, DEPTH
from tests.support.examples import workers_of
from tests.support.servers import RedisServer, free_port

pytestmark = [pytest.mark.fault, pytest.mark.serial]

KILLS = 10 * DEPTH if DEEP else 5
# Seconds from the server's return until a handler runs.
MOST_SECONDS = 2.0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_handlers_run_within_2_s_of_the_return_of_a_redis_that_is_killed_again_and_again(
    tmp_path: Path, loop: str
) -> None:
    gaps: list[float] = []
    with RedisServer(port=free_port(), appendonly="yes", appendfsync="always") as server:
        async with under_load(tmp_path, server.tcp_url, workers=2, loop=loop) as (load, process):
            workers = set(workers_of(process.pid))
            for _ in range(KILLS):
                await load.goes_on()
                server.stop(signal.SIGKILL)
                await asyncio.to_thread(server.start)
                back = time.monotonic_ns()
                gaps.append((await load.first_run_after(back) - back) / 1e9)
            await load.finish()
            assert set(workers_of(process.pid)) == workers, process.text
    assert max(gaps) < MOST_SECONDS, gaps
    # What ran when the server died is settled when it is back, and does not run again.
    assert load.repeated == 0
