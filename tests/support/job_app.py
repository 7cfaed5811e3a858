"""An app with handlers of every kind that wait for other jobs. Its URL is set late, as app factories do."""

from __future__ import annotations

import os
import signal

from qworker import Context, Tasks
from qworker.retry import Backoff
from tests.support.waiting import block_for, work_for

__all__ = ["tasks"]

tasks = Tasks()
_AT_ONCE = Backoff(initial=0.05, maximum=0.05)


@tasks.task(result=60)
async def add_async(n: int) -> int:
    return n + 1


@tasks.task(result=60)
def add_thread(n: int) -> int:
    return n + 1


@tasks.task(result=3600, max_tries=1000, retry=_AT_ONCE)
async def pause_async(n: int) -> int:
    await work_for(0.3)
    return n + 1


@tasks.task(result=3600, max_tries=1000, retry=_AT_ONCE)
def pause_thread(n: int) -> int:
    block_for(0.3)
    return n + 1


@tasks.task(result=60, process=True)
def add_process(n: int) -> int:
    return n + 1


@tasks.task(result=60)
async def parent_async(context: Context, child: str, n: int) -> int:
    # The same child if the parent runs again, also if the child has ended.
    value: int = await (await tasks[child].using(id=f"child-{context.message.id}", hold=600).enqueue(n)).result(
        timeout=40
    )
    return value


@tasks.task(result=60)
def parent_thread(child: str, n: int) -> int:
    value: int = tasks[child].enqueue_sync(n).result_sync(timeout=40)
    return value


@tasks.task(result=60, process=True)
def parent_process(child: str, n: int) -> int:
    value: int = tasks[child].enqueue_sync(n).result_sync(timeout=40)
    return value


@tasks.task(result=60, max_tries=2, retry=_AT_ONCE)
async def suspect_child(context: Context, n: int) -> int:
    """Kills its process at the first attempt, so the second one, which is the last, is isolated."""
    if context.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return n + 1


@tasks.task(result=60, max_tries=3, retry=_AT_ONCE)
async def suspect_parent(context: Context, child: str, n: int) -> int:
    if context.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    value: int = await (await tasks[child].using(id=f"child-{context.message.id}", hold=600).enqueue(n)).result(
        timeout=40
    )
    return value


@tasks.task(result=60, process=True)
def walk_process(context: Context) -> int:
    for number in range(1, 4):
        context.progress(number, 3, data={"pid": os.getpid()})
        block_for(0.7)
    return os.getpid()


@tasks.task(result=60, process=True)
def sleep_process(_n: int = 0) -> None:
    block_for(3600)
