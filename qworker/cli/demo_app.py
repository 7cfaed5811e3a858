"""The app that `qworker demo` runs in worker processes. Its handlers write to a ledger that the demo reads."""

from __future__ import annotations

import asyncio
import os

from qworker import Backoff, Context, Fail, Tasks

__all__ = ["DEMO_LOG", "LONG_S", "hopeless", "long", "short", "stumbling", "tasks"]

# The environment variable with the path of the ledger.
DEMO_LOG = "QWORKER_DEMO_LOG"
# Seconds that `long` runs. Its worker is killed meanwhile.
LONG_S = 2.0

tasks = Tasks()
_SOON = Backoff(initial=0.3, maximum=0.3)


@tasks.task(queue="demo")
async def short(context: Context, name: str) -> None:
    """Run for a short time."""
    _note(context, "begin", name)
    await asyncio.sleep(0.08)
    _note(context, "end", name)


@tasks.task(queue="demo")
async def long(context: Context, name: str) -> None:
    """Run until the worker is killed, and to the end in the second attempt."""
    _note(context, "begin", name)
    await asyncio.sleep(LONG_S)
    _note(context, "end", name)


@tasks.task(queue="demo", retry=_SOON)
async def stumbling(context: Context, name: str) -> None:
    """Fail once, and then succeed."""
    _note(context, "begin", name)
    if context.tries == 0:
        raise ConnectionError("connection closed")
    _note(context, "end", name)


@tasks.task(queue="demo")
async def hopeless(context: Context, name: str) -> None:
    """Fail permanently."""
    _note(context, "begin", name)
    raise Fail(f"{name} is not a picture")


def _note(context: Context, event: str, name: str) -> None:
    # The text of one write to a file opened with O_APPEND is not mixed with that of another process.
    line = f"{event} {context.task} {name} {context.tries} {os.getpid()}\n".encode()
    descriptor = os.open(os.environ[DEMO_LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
