"""The app of the soak: every start of a message leaves a line with its tries, and every end another.

The book `handlers` has a line for each start and each real end of a handler, also if it is cancelled:
`start|ended|cancelled BODY TOKEN PID NANOSECONDS`, by the monotonic clock that all processes of the machine share.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

from qworker import Context, Message, Tasks
from tests.fault.programs import QUEUE, Ledger

tasks = Tasks(os.environ["SOAK_URL"])
ledger = Ledger(Path(os.environ["SOAK_LEDGER"]))
# Seconds that one handler in twenty runs: so long that its lease is extended.
LONG = float(os.environ.get("SOAK_LONG", "0"))


@tasks.raw_handler(queue=QUEUE, max_tries=1000)
async def on_message(ctx: Context, message: Message) -> None:
    name = message.body.decode()
    _note("start", name, ctx.token)
    end = "cancelled"
    try:
        ledger.write("started", f"{name}:{message.tries}")
        await asyncio.sleep(LONG if LONG and random.random() < 0.05 else random.random() * 0.05)
        ledger.write("finished", name)
        end = "ended"
    finally:
        _note(end, name, ctx.token)


def _note(what: str, name: str, token: int) -> None:
    ledger.write("handlers", f"{what} {name} {token} {os.getpid()} {time.monotonic_ns()}")
