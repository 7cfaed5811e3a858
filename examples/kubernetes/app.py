"""A task for the pods of this example. Its queue is wherever QWORKER_URL says."""

import asyncio

from qworker import Context, Tasks

tasks = Tasks()


@tasks.task(max_tries=5, timeout=20)
async def greet(context: Context, name: str, seconds: float = 0.1) -> None:
    """Take a while, and greet."""
    await asyncio.sleep(seconds)
    context.log.info("greeted", name=name)
