"""`qworker demo`: kill a worker process, and show that its messages run again. Or show the dashboard."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import click
import msgspec

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.cli.demo_app import DEMO_LOG, hopeless, long, short, stumbling, tasks
from qworker.cli.demo_ui import serve_demo
from qworker.cli.demo_worker import start_worker
from qworker.cli.options import Command, run
from qworker.cli.output import echo
from qworker.cli.ui import DEFAULT_PORT
from qworker.errors import QworkerError, UsageError
from qworker.logs import one_line
from qworker.message import Query, QueueStats, State

__all__ = ["command"]

_QUEUE = "demo"
_SHORT = 24
_CONCURRENCY = 4
# Seconds for each step on a busy machine. An idle one needs a few seconds for all of them.
_PATIENCE_S = 60.0
_EXIT_FAILED = 1


class _DemoError(QworkerError):
    """A step of the demo did not have the expected result."""


class _Note(msgspec.Struct, frozen=True):
    """One line of the ledger."""

    event: str
    task: str
    name: str
    tries: int
    pid: int


@click.command("demo", cls=Command)
@click.option("--keep", is_flag=True, help="Keep the temporary directory.")
@click.option("--ui", is_flag=True, help="Serve the dashboard of a demo store until Ctrl-C. Needs the extra ui.")
@click.option("--port", metavar="PORT", type=int, help="Port of --ui instead of 8081. 0: a free port.")
def command(keep: bool, ui: bool, port: int | None) -> int:
    """Show that a killed worker loses no message.

    Takes a few seconds, and needs nothing but Python. Enqueues a few dozen calls in a queue in a temporary directory,
    starts a worker process, and kills it with SIGKILL while it runs a message. The message runs again in the next
    worker. One call fails and then succeeds, and one fails permanently. Exit status 0 only if all of that happened.

    With --ui, the temporary directory has queues with messages in every state and workers that run them. The command
    prints a link to the dashboard.
    """
    if ui:
        if keep:
            raise UsageError("--keep is not for --ui")
        return serve_demo(DEFAULT_PORT if port is None else port)
    if port is not None:
        raise UsageError("--port is for --ui")
    root = tempfile.mkdtemp(prefix="qworker-demo-")
    try:
        return run(_Demo(root).run())
    finally:
        if keep:
            echo(f"kept: {root}")
        else:
            shutil.rmtree(root)


class _Demo:
    """One run of the demo, step by step."""

    def __init__(self, root: str) -> None:
        self._url = f"file://{root}/spool"
        self._ledger = os.path.join(root, "ledger")
        self._worker: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()
        self._last: QueueStats | None = None

    async def run(self) -> int:
        backend = open_backend(self._url)
        try:
            await backend.open()
            await self._enqueue()
            await self._first_worker(backend)
            await self._second_worker(backend)
            await self._judge(backend)
        except _DemoError as error:
            self._say(f"NOT SHOWN: {error}")
            return _EXIT_FAILED
        finally:
            self._end_worker()
            await backend.aclose()
        return 0

    # -- the steps ---------------------------------------------------------------------------------------------------

    async def _enqueue(self) -> None:
        tasks.url = self._url
        calls = [long.call("film"), stumbling.call("clip"), hopeless.call("text")]
        calls += [short.call(f"picture-{number}") for number in range(_SHORT)]
        jobs = await tasks.enqueue_many(calls)
        await tasks.aclose()
        self._say(f"enqueued {len(jobs)} calls in {self._url}: each is one file")

    async def _first_worker(self, backend: Backend) -> None:
        worker = self._start_worker()
        await self._until(backend, "the long message to begin", lambda: self._seen("begin", "film"))
        await self._until(backend, "a short message to end", lambda: any(n.event == "end" for n in self._notes()))
        if self._seen("end", "film"):
            raise _DemoError("the worker finished the long message before it could be killed")
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self._say(f"killed worker {worker.pid} with SIGKILL in the middle of `film`, which is still leased:")
        await self._show(backend)

    async def _second_worker(self, backend: Backend) -> None:
        worker = self._start_worker()
        again = "`film` to run again"
        await self._until(backend, again, lambda: any(n.name == "film" and n.tries for n in self._notes()))
        note = next(n for n in self._notes() if n.name == "film" and n.tries)
        self._say(f"`film` runs again with tries {note.tries}: nothing is lost")
        self._say(f"it runs in process {note.pid} of worker {worker.pid}: if it kills that too, the worker lives")
        await self._until_settled(backend)
        worker.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(worker.wait, _PATIENCE_S)
        self._say(f"worker {worker.pid} drained on SIGTERM and ended with status {status}")
        if status != 0:
            raise _DemoError("the worker did not end cleanly")

    async def _judge(self, backend: Backend) -> None:
        notes = self._notes()
        ended = {note.name for note in notes if note.event == "end"}
        missing = {"film", "clip", *(f"picture-{number}" for number in range(_SHORT))} - ended
        if missing:
            raise _DemoError(f"these messages never finished: {', '.join(sorted(missing))}")
        if [n.tries for n in notes if n.name == "film" and n.event == "end"] != [1]:
            raise _DemoError("`film` should have finished once, with tries 1")
        # The killed worker can have held the second attempt too. Then there is a third one.
        clip = [n.tries for n in notes if n.name == "clip" and n.event == "end"]
        if not clip or min(clip) < 1:
            raise _DemoError("`clip` should have failed once and then succeeded")
        failed = await list_messages(backend, _QUEUE, Query(State.FAILED))
        reasons = [one_line(stored.error or "") for stored in failed]
        if len(failed) != 1 or "is not a picture" not in str(reasons):
            raise _DemoError(f"exactly one message should have failed permanently, not {len(failed)}: {reasons}")
        self._say("`clip` failed once (connection closed) and succeeded when it ran again")
        self._say(f"`text` failed permanently and is kept with its reason: {reasons[0]}")
        twice = sum(n.event == "begin" for n in notes) - len(ended) - 2
        self._say(
            f"all {len(ended)} others finished. {twice} were leased by the killed worker and began twice."
            " All as promised."
        )

    # -- the worker --------------------------------------------------------------------------------------------------

    def _start_worker(self) -> subprocess.Popen[bytes]:
        arguments = ["qworker.cli.demo_app:tasks", "--concurrency", str(_CONCURRENCY)]
        env = {"QWORKER_URL": self._url, DEMO_LOG: self._ledger}
        self._worker = start_worker([*arguments, "--log-level", "error"], env)
        self._say(f"started worker {self._worker.pid}: qworker run {' '.join(arguments)}")
        return self._worker

    def _end_worker(self) -> None:
        if self._worker is not None and self._worker.poll() is None:
            self._worker.kill()
            self._worker.wait()

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _until(self, backend: Backend, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not condition():
            if self._worker is not None and self._worker.poll() is not None:
                raise _DemoError(f"worker {self._worker.pid} ended by itself with status {self._worker.returncode}")
            if time.monotonic() > until:
                raise _DemoError(f"waited {_PATIENCE_S:.0f} s for {what}")
            await self._show(backend)
            await asyncio.sleep(0.02)

    async def _until_settled(self, backend: Backend) -> None:
        await self._until(backend, "everything to be settled", self._is_settled)

    def _is_settled(self) -> bool:
        last = self._last
        return last is not None and last.ready + last.leased + last.delayed == 0

    def _notes(self) -> list[_Note]:
        try:
            with open(self._ledger, encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            # No handler has begun yet.
            return []
        lines = (line.split() for line in text.splitlines())
        return [_Note(event, task, name, int(tries), int(pid)) for event, task, name, tries, pid in lines]

    def _seen(self, event: str, name: str) -> bool:
        return any(note.event == event and note.name == name for note in self._notes())

    async def _show(self, backend: Backend) -> None:
        """Print the queue's counts, if they have changed."""
        now = await backend.stats(_QUEUE)
        counts = (now.ready, now.leased, now.delayed, now.failed)
        last = self._last
        if last is None or counts != (last.ready, last.leased, last.delayed, last.failed):
            bar = "".join(mark * count for mark, count in zip(_marks(), counts, strict=False))
            self._say(
                f"  ready {now.ready:2}  leased {now.leased:2}  delayed {now.delayed:2}  failed {now.failed:2}  {bar}"
            )
        self._last = now

    def _say(self, text: str) -> None:
        echo(f"{time.monotonic() - self._began:6.2f} s  {text}")


def _marks() -> str:
    """Return the characters of the bars, for ready, leased and delayed messages."""
    try:
        "█▒░".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#=."
    return "█▒░"
