"""A task for the pods of this example. QWORKER_URL names its backend."""

import asyncio

from qworker import Context, Tasks

tasks = Tasks()


@tasks.task(max_tries=5, timeout=20)
async def greet(context: Context, name: str, seconds: float = 0.1) -> None:
    """Wait a moment, and print a greeting."""
    await asyncio.sleep(seconds)
    context.log.info("greeted", name=name)
