"""The health port answers and the lease is extended while a handler blocks the loop and the interpreter's lock."""

from __future__ import annotations

import http.client
import time
from typing import Any

from harness import Bench, Figure
from harness.report import percentile
from harness.running import Ledger, running, write_app
from harness.stopwatch import Stopwatch

ASKED_MS = 100.0
_PAUSE_S = 0.02


def measure(bench: Bench) -> list[Figure]:
    """The slowest answers while it blocks, and how often the message ran, beside a second worker that would take it."""
    blocked = bench.size(10, 3)
    # Three times and more would it expire, were it not extended.
    visibility = blocked / 4
    folder = bench.fresh()
    url = bench.url(folder)
    write_app(folder)
    ledger = Ledger(folder)
    options = ("--visibility-timeout", str(visibility), "--stall-timeout", "60")
    with running(folder, url, "--health", "127.0.0.1:0", *options) as worker:
        port = int(worker.event("health_server_started")["port"])
        # The first answers pay for imports and the first look.
        for page in ("/livez", "/metrics"):
            _ask(port, page)
        bench.call(publish, url=url, seconds=blocked)
        while not ledger.begins:
            ledger.read()
            time.sleep(0.01)
        with running(folder, url, "--visibility-timeout", str(visibility)) as other:
            times = _asked_meanwhile(port, ledger)
            other.drain()
        worker.drain()
    ledger.read()
    return [
        *(
            Figure(
                figure="health",
                what=f"slowest answer of {page} while a handler blocks the loop for {blocked} s",
                asked=ASKED_MS,
                measured=max(found),
                unit="ms",
                note=f"{len(found)} answers, p50 {percentile(found, 0.5):.1f} ms",
            )
            for page, found in times.items()
        ),
        Figure(
            figure="health",
            what="runs of its message, with a second worker on the queue",
            asked=1,
            measured=len(ledger.begins),
            unit="",
            note=f"visibility {visibility:g} s",
        ),
    ]


def _asked_meanwhile(port: int, ledger: Ledger) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"/livez": [], "/metrics": []}
    while not ledger.done:
        for page, found in times.items():
            timer = Stopwatch()
            _ask(port, page)
            found.append(timer.seconds * 1e3)
            time.sleep(_PAUSE_S)
        ledger.read()
    return times


def _ask(port: int, page: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", page)
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{page} answers {answer.status}")


def publish(given: dict[str, Any]) -> None:
    """One call of `block`."""
    from harness.work import QUEUE, run_loop
    from qworker import Draft
    from qworker.backend.registry import open_backend

    async def run() -> None:
        backend = open_backend(given["url"])
        await backend.publish(QUEUE, [Draft(body=b'{"task":"block","args":[1,%f]}' % given["seconds"])])
        await backend.aclose()

    run_loop(run())
