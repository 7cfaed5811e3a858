"""`qworker demo --ui`: a store with something in every state, the workers that keep it alive, and its dashboard."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count, islice

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.backend.offers import samples_of
from qworker.cli.demo_past import Past, ring_of
from qworker.cli.demo_shop import (
    charge,
    deliver,
    import_file,
    index,
    monthly,
    newsletter,
    receipt,
    refund,
    reminder,
    resize,
    tasks,
)
from qworker.cli.demo_worker import start_worker
from qworker.cli.output import echo
from qworker.cli.ui import import_ui, serve_ui
from qworker.clock import SystemClock
from qworker.task import Call

__all__ = ["serve_demo"]

_PASTS = {
    "mail": Past(per_second=6, run_s=0.08, waiting=3),
    "photos": Past(per_second=12, run_s=0.12, waiting=12, failed=0.02, retried=0.05),
    "payments": Past(per_second=3, run_s=0.3, waiting=2, failed=0.12, retried=0.2),
    "reports": Past(per_second=0.01, run_s=180),
    "catalog": Past(per_second=0.2, run_s=0.1, stopped_s=2100, paused=True),
    "newsletter": Past(per_second=10, run_s=0.2, batch=18_000, batch_s=600),
    "imports": Past(per_second=0.05, run_s=0.3),
    "webhooks": Past(per_second=2, run_s=0.2, stopped_s=860),
}
# The queues that have workers. The mail server of the newsletter takes one mail at a time.
_QUEUES = ("mail", "photos", "payments", "reports", "catalog", "newsletter=1", "imports")
# Seconds between two rounds of new messages.
_ROUND_S = 0.5
# The parts in which messages are published that have waited for different times.
_PARTS = 20
# Seconds that the workers get to end.
_DRAIN_S = 5.0
_EXIT_WORKERS_ENDED = 1
# They run, or Ctrl-C has reached them first, and they have drained, or had no time for it.
_CALM = (None, 0, 4)


def serve_demo(port: int) -> int:
    """Serve the dashboard of a demo store until a signal.

    Args:
        port: The port to listen on. 0: a free one.

    Returns:
        The exit status.

    Raises:
        MissingExtra: The extra `ui` is not installed.
        BackendUnavailable: The port cannot be used.
    """
    import_ui("qworker demo --ui")
    root = tempfile.mkdtemp(prefix="qworker-demo-")
    try:
        return asyncio.run(_Shop(root).run(port))
    finally:
        shutil.rmtree(root)


class _LateClock(SystemClock):
    """A clock that is late, for messages that have waited for some time."""

    def __init__(self) -> None:
        self.late_s = 0.0

    def time(self) -> float:
        """Return the seconds since the Unix epoch, some time ago."""
        return super().time() - self.late_s


class _Shop:
    """The store, its workers, and what publishes messages.

    Args:
        root: An empty directory.
    """

    def __init__(self, root: str) -> None:
        self._log = os.path.join(root, "workers.log")
        # Nothing of it has to survive a power failure.
        self._url = f"file://{root}/shop?sync=off&keep_done=1000-messages"
        self._clock = _LateClock()
        self._orders = count(1000)

    async def run(self, port: int) -> int:
        tasks.url, tasks.clock = self._url, self._clock
        await self._fill()
        with open(self._log, "wb") as log:
            workers = start_worker(
                ["qworker.cli.demo_shop:tasks", *[f"-Q{queue}" for queue in _QUEUES], "-w2", "--shutdown-timeout=1s"],
                {"QWORKER_URL": self._url},
                log,
            )
        traffic = asyncio.create_task(self._publish())
        try:
            echo(
                "A shop with made-up work in a temporary directory. The charts of the time before now are made up, too."
            )
            echo("Ctrl-C ends it and removes the directory.")
            await serve_ui(self._url, port, tasks)
            return self._judge(workers)
        finally:
            traffic.cancel()
            with suppress(asyncio.CancelledError):
                await traffic
            await tasks.aclose()
            await _end(workers)

    # -- what the store has at the start -------------------------------------------------------------------------------

    async def _fill(self) -> None:
        backend = await tasks.backend()
        for queue in _PASTS:
            await backend.create(queue)
        await backend.pause("catalog")
        await self._pile_up("webhooks", (deliver.call(f"https://shop-{n % 40}.example/hook", "paid") for n in count()))
        await self._pile_up("catalog", (index.call(f"product-{n}") for n in count(200)))
        await self._pile_up("newsletter", (newsletter.call(f"reader-{n}@example.org", 52) for n in count()))
        await tasks.enqueue_many(
            [
                *(reminder.using(delay=900.0 * (n + 1)).call(f"customer-{n}@example.org") for n in range(24)),
                *(monthly.call(month) for month in ("August", "September", "October")),
                *(import_file.call(f"prices-{n}.{'zip' if n == 3 else 'csv'}") for n in range(8)),
            ]
        )
        await self._call_as_before()
        await self._put_schedules()
        await self._write_past(backend)

    async def _pile_up(self, queue: str, calls: Iterator[Call]) -> None:
        """Publish what waits in a queue, as if it had been published over the time for which it has waited."""
        past = _PASTS[queue]
        since = past.stopped_s or past.batch_s
        for part in range(_PARTS):
            self._clock.late_s = since * (1 - part / _PARTS) if past.stopped_s else since
            await tasks.enqueue_many(islice(calls, past.ready // _PARTS))
        self._clock.late_s = 0.0

    async def _call_as_before(self) -> None:
        """Enqueue a call as an old version of the app does, which does not know an argument."""
        old = Tasks(self._url)
        await old.named("photos.resize", queue="photos").enqueue("logo.png")
        await old.aclose()

    async def _put_schedules(self) -> None:
        await tasks.schedules.put("newsletter.weekly", newsletter.call("all readers", 53), every=timedelta(days=7))
        await tasks.schedules.put("catalog.rebuild", index.call("everything"), every=timedelta(days=1))
        await tasks.schedules.pause("catalog.rebuild")

    async def _write_past(self, backend: Backend) -> None:
        samples, now = samples_of(backend), self._clock.time()
        assert samples is not None
        for queue, past in _PASTS.items():
            await samples.write(queue, 0, ring_of(queue, past, now))

    # -- what happens from then on -------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Publish orders, photos and charges, about as many as before."""
        while True:
            await tasks.enqueue_many(self._round())
            await asyncio.sleep(_ROUND_S)

    def _round(self) -> Iterator[Call]:
        orders = list(islice(self._orders, 3))
        yield from (receipt.call(order, f"customer-{order}@example.org") for order in orders)
        yield from (charge.call(order, f"{order % 90 + 9}.90", f"tok_{order}") for order in orders)
        yield from (resize.call(f"IMG_{order}.jpg", order, width) for order in orders for width in (320, 1280))
        yield deliver.call(f"https://shop-{orders[0] % 40}.example/hook", "paid")
        yield from (refund.call(order) for order in orders if order % 60 == 0)
        yield from (monthly.call("November") for order in orders if order % 600 == 0)

    def _judge(self, workers: subprocess.Popen[bytes]) -> int:
        """Return the exit status, and say what went wrong with the workers."""
        if workers.poll() in _CALM:
            return 0
        with open(self._log, encoding="utf-8", errors="replace") as log:
            echo(f"The workers have ended by themselves with status {workers.returncode}:\n{log.read()[-2000:]}")
        return _EXIT_WORKERS_ENDED


async def _end(workers: subprocess.Popen[bytes]) -> None:
    """End the workers. Ctrl-C has reached them as well, so that this is their second signal."""
    if workers.poll() is None:
        workers.terminate()
    try:
        await asyncio.to_thread(workers.wait, _DRAIN_S)
    except subprocess.TimeoutExpired:
        workers.kill()
        workers.wait()
