"""Results with arq as it comes: `arq_results.py URL COUNT` prints the milliseconds from each enqueue to its result."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func


async def add(ctx: dict[str, object], number: int) -> int:
    """Return the next number."""
    return number + 1


async def main() -> None:
    """Wait for results one by one, with a worker in the same process."""
    settings = RedisSettings.from_dsn(sys.argv[1])
    pool = await create_pool(settings)
    worker = Worker([func(add, name="add")], redis_settings=settings, handle_signals=False)
    running = asyncio.create_task(worker.async_run())
    taken: list[float] = []
    for number in range(int(sys.argv[2]) + 1):
        started = time.perf_counter()
        job = await pool.enqueue_job("add", number)
        assert job is not None
        assert await job.result(timeout=30) == number + 1
        taken.append((time.perf_counter() - started) * 1e3)
    # The first one finds everything cold.
    print(json.dumps(taken[1:]), flush=True)
    running.cancel()


if __name__ == "__main__":
    asyncio.run(main())
