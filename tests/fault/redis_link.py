"""Publishes over an interface that goes down and up, in a network namespace without any other interface.

Run as `unshare --net python redis_link.py MESSAGES`. Prints the numbers of messages that were published, that ran, and
that ran twice, and the number of outages.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import let_pass

QUEUE = "work"
PUBLISHERS = 10


def set_link(state: str) -> None:
    """Set the only interface up or down."""
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def _draft(number: int) -> Draft:
    """Every second message has a given id."""
    return Draft(body=b"%d" % number, id=f"order-{number}" if number % 2 else None)


async def main(messages: int) -> None:
    set_link("up")
    runs: Counter[str] = Counter()
    done = asyncio.Event()
    outages = 0
    with RedisServer(port=free_port()) as server:
        query = "?timeout=0.2&retry_timeout=100"
        worker = open_backend(server.url)

        async def work() -> None:
            while True:
                leases = await worker.lease(QUEUE, 500, 1000.0, 0.1)
                runs.update(lease.message.body.decode() for lease in leases)
                await worker.settle([Settlement(lease=one, action=SettleAction.ACK) for one in leases])
                if done.is_set() and not leases and not (await worker.stats(QUEUE)).ready:
                    return

        async def publish(first: int) -> int:
            backend = open_backend(server.tcp_url + query)
            published = 0
            for number in range(first, messages, PUBLISHERS):
                published += len(await backend.publish(QUEUE, [_draft(number)]))
                await let_pass(0.05)
            await backend.aclose()
            return published

        async def disturb() -> None:
            nonlocal outages
            while True:
                await let_pass(0.15)
                set_link("down")
                await let_pass(0.5)
                set_link("up")
                outages += 1

        await worker.create(QUEUE)
        working, disturbing = asyncio.create_task(work()), asyncio.create_task(disturb())
        published = sum(await asyncio.gather(*[publish(number) for number in range(PUBLISHERS)]))
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        set_link("up")
        # The kernel has sent again what it has kept.
        await let_pass(3)
        done.set()
        await working
        await worker.aclose()
    print(published, len(runs), sum(count > 1 for count in runs.values()), outages)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
