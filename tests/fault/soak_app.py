"""The app of the soak: every start of a message leaves a line with its tries, and every end another."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from qworker import Message, Tasks
from tests.fault.programs import QUEUE, Ledger

tasks = Tasks(os.environ["SOAK_URL"])
ledger = Ledger(Path(os.environ["SOAK_LEDGER"]))


@tasks.raw_handler(queue=QUEUE, max_tries=1000)
async def on_message(message: Message) -> None:
    name = message.body.decode()
    ledger.write("started", f"{name}:{message.tries}")
    await asyncio.sleep(random.random() * 0.05)
    ledger.write("finished", name)
