"""The app that `qworker demo` runs in real worker processes. Each handler notes what it does in a ledger that the demo reads."""

from __future__ import annotations

import asyncio
import os

from qworker import Backoff, Context, Fail, Tasks

__all__ = ["DEMO_LOG", "LONG_S", "hopeless", "long", "short", "stumbling", "tasks"]

# The environment variable with the ledger's path.
DEMO_LOG = "QWORKER_DEMO_LOG"
# Seconds that the message takes whose worker is killed.
LONG_S = 2.0

tasks = Tasks()
_SOON = Backoff(initial=0.3, maximum=0.3)


@tasks.task(queue="demo")
async def short(context: Context, name: str) -> None:
    """Ordinary work."""
    _note(context, "begin", name)
    await asyncio.sleep(0.08)
    _note(context, "end", name)


@tasks.task(queue="demo")
async def long(context: Context, name: str) -> None:
    """Work that is killed in its middle, the first time."""
    _note(context, "begin", name)
    await asyncio.sleep(LONG_S)
    _note(context, "end", name)


@tasks.task(queue="demo", backoff=_SOON)
async def stumbling(context: Context, name: str) -> None:
    """Work that fails once, and then succeeds."""
    _note(context, "begin", name)
    if context.tries == 0:
        raise ConnectionError("the other side hung up")
    _note(context, "end", name)


@tasks.task(queue="demo")
async def hopeless(context: Context, name: str) -> None:
    """Work that no retry can fix."""
    _note(context, "begin", name)
    raise Fail(f"{name} is not a picture")


def _note(context: Context, event: str, name: str) -> None:
    # One write to a file opened for appending is not torn by that of another process.
    line = f"{event} {context.task} {name} {context.tries} {os.getpid()}\n".encode()
    descriptor = os.open(os.environ[DEMO_LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
