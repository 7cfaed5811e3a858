"""A worker as on another host: it has another boot id. Its wall clock is moved from outside (tests/support/clocks.py).

    python -m tests.fault.other_host HOST URL LEDGER CONCURRENCY VISIBILITY

It writes `HOST:BODY` to `started` when a message starts, and to `cancelled` when its handler is cancelled. A handler
runs until its process is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from qworker.kit import linux

HOST = sys.argv[1]
# Before any module takes the function from there.
linux.boot_id = lambda: f"boot-of-{HOST}"

from qworker import Message, Tasks  # noqa: E402
from qworker.worker import Worker, WorkerOptions  # noqa: E402
from tests.fault.programs import QUEUE, Ledger  # noqa: E402


async def main(url: str, ledger: Ledger, concurrency: int, visibility: float) -> None:
    tasks = Tasks(url)

    @tasks.raw_handler(queue=QUEUE, max_tries=1000)
    async def on_message(message: Message) -> None:
        ledger.write("started", f"{HOST}:{message.body.decode()}")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ledger.write("cancelled", f"{HOST}:{message.body.decode()}")
            raise

    options = WorkerOptions(queues=(QUEUE,), concurrency=concurrency, visibility_timeout=visibility)
    await Worker(tasks, options).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2], Ledger(Path(sys.argv[3])), int(sys.argv[4]), float(sys.argv[5])))
