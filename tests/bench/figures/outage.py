"""A Redis with `appendfsync always` that is killed and started again under load: lost messages, and time to recover."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from typing import Any

from harness import Bench, Figure
from harness.bench import Child
from harness.report import spread
from harness.running import Ledger, running, until, write_app
from harness.server import redis_server

ASKED_S = 2.0
# Finished messages between two kills.
_BETWEEN = 2_000


def measure(bench: Bench) -> list[Figure]:
    """Seconds from the server's return to the next handler's start, and what became of everything that was accepted."""
    times = bench.size(10, 2)
    folder = bench.fresh()
    write_app(folder)
    ledger = Ledger(folder)
    gaps: list[float] = []
    with (
        redis_server(folder, "--appendonly", "yes", "--appendfsync", "always") as server,
        running(folder, server.url) as worker,
        Child(publish, {"url": server.url}) as publishing,
    ):
        for _ in range(times):
            enough = _begun(ledger) + bench.size(_BETWEEN, 100)
            until(partial(_has_begun, ledger, enough), "messages before the kill")
            server.kill()
            server.start()
            back = time.monotonic_ns()
            until(partial(_began_after, ledger, back), "work after the restart")
            gaps.append((next(at for at in ledger.begins if at > back) - back) / 1e9)
        publishing.tell()
        accepted: int = publishing.result()
        until(lambda: _begun(ledger) and len(ledger.done) >= accepted, "everything done")
        survived = worker.alive
        worker.drain()
    ledger.read()
    return [
        Figure(
            figure="outage",
            what=f"Redis killed {times} times under load: its return to the next handler's start, longest",
            asked=ASKED_S,
            measured=max(gaps),
            unit="s",
            rounds=gaps,
            note=spread(gaps),
        ),
        Figure(
            figure="outage",
            what="accepted messages lost",
            asked=0,
            measured=accepted - len(ledger.done),
            unit="",
            note=f"of {accepted:,}; {ledger.repeated} ran again after they were done,"
            f" {ledger.overlapped} twice at once",
        ),
        Figure(
            figure="outage",
            what="worker processes that had to be restarted",
            asked=0,
            measured=int(not survived),
            unit="",
        ),
    ]


def _begun(ledger: Ledger) -> int:
    ledger.read()
    return len(ledger.begins)


def _has_begun(ledger: Ledger, count: int) -> bool:
    return _begun(ledger) >= count


def _began_after(ledger: Ledger, moment: int) -> bool:
    return _begun(ledger) > 0 and ledger.begins[-1] > moment


def publish(given: dict[str, Any]) -> int:
    """Publish calls of `step` until told to end; how many were accepted: all that were tried."""
    from harness.work import QUEUE, run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend
    from qworker.errors import BackendError
    from qworker.names import new_ids

    async def run() -> int:
        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        loop.add_reader(sys.stdin, told.set)
        backend = open_backend(given["url"])
        accepted = 0
        while not told.is_set():
            drafts = [
                Draft(id=made, body=b'{"task":"step","args":[%d,0]}' % (accepted + number))
                for number, made in enumerate(new_ids(20))
            ]
            while True:
                try:
                    await backend.publish(QUEUE, drafts)
                    break
                except BackendError:
                    # Perhaps stored: the same ids make it once.
                    await asyncio.sleep(0.05)
            accepted += len(drafts)
            await asyncio.sleep(0.005)
        loop.remove_reader(sys.stdin)
        await backend.aclose()
        return accepted

    return run_loop(run())
