"""One worker in this process, with its signals, its limits and its end.

The same code runs under a supervisor and without one. The first SIGTERM, SIGINT or SIGHUP drains, and a second one
cancels the handlers and releases their messages. SIGTSTP stops leasing. SIGUSR1 dumps the status.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any

import structlog

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.errors import AppImportError, UsageError
from qworker.health.endpoint import Endpoint, endpoint_for_worker
from qworker.health.monitor import Monitor, Reporter
from qworker.kit.gc_freeze import freeze_loaded_modules
from qworker.kit.task_groups import background_tasks
from qworker.logs import configure, show_standard_logging
from qworker.streams import flush_all
from qworker.supervisor.connect import connect
from qworker.supervisor.control_socket import ControlClient, WorkerCommand, WorkerReady
from qworker.supervisor.event_loop import loop_factory
from qworker.supervisor.recycling import has_reached, watch_memory, watch_sources
from qworker.supervisor.reexec import deliver_signals, is_replacement, replace_process
from qworker.supervisor.run_settings import ExitStatus, RunSettings
from qworker.supervisor.signals import Signals
from qworker.supervisor.source_watcher import wait_for_change
from qworker.supervisor.status_dump import format_status
from qworker.supervisor.watcher import run_watcher
from qworker.worker import Worker, WorkerOptions, telemetry
from qworker.worker.outage import Outage

__all__ = ["run_single"]

# Seconds beyond its grace period for a worker whose supervisor is dead and whose event loop is blocked.
_ORPHAN_MARGIN_S = 10.0


class _ExitReason(Enum):
    """Why a worker has ended."""

    FINISHED = "finished"
    # A fresh process takes over.
    RECYCLED = "recycled"
    TIMED_OUT = "timed out"


def run_single(load: Callable[[], Tasks], settings: RunSettings, control: ControlClient | None = None) -> ExitStatus:
    """Run a worker until it is stopped or, with `burst`, until nothing is left to do.

    Args:
        load: Imports the app.
        settings: The options of `qworker run`.
        control: The connection to the supervisor, if there is one.

    Returns:
        CLEAN or DRAIN_TIMED_OUT. A recycled worker does not return: a fresh process takes its place.

    Raises:
        AppImportError: The app cannot be imported. With `reload`, only under a supervisor, which waits for the fix.
        BackendError: The backend cannot be reached at the start, and the worker is not to wait for it.
    """
    deliver_signals(early=True)
    configure(settings.log_json, settings.log_level)
    watch = Monitor(settings.concurrency)
    outlet = _outlet(watch, settings, control)
    try:
        status = _run(load, settings, control, watch, outlet)
    finally:
        if outlet is not None:
            outlet.close()
    _exit_if_threads_remain(status)
    return status


def _run(
    load: Callable[[], Tasks],
    settings: RunSettings,
    control: ControlClient | None,
    watch: Monitor,
    outlet: Endpoint | None,
) -> ExitStatus:
    try:
        tasks = load()
    except AppImportError as error:
        if not settings.reload or control is not None:
            raise
        structlog.get_logger().error("import_failed", error=str(error), waiting_for="a change of the source")
        wait_for_change()
        if outlet is not None:
            outlet.keep_across_exec()
        replace_process()
    show_standard_logging(settings.log_json, settings.log_level)
    with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
        end = runner.run(_WorkerMain(tasks, settings, control, watch).run())
    telemetry.flush()
    if end is _ExitReason.RECYCLED:
        if outlet is not None:
            outlet.keep_across_exec()
        if control is not None:
            control.keep_across_exec()
        # With new source, it decides what a schedule is.
        replace_process(worked=True, started=None if settings.reload else settings.started)
    return ExitStatus.CLEAN if end is _ExitReason.FINISHED else ExitStatus.DRAIN_TIMED_OUT


def _outlet(watch: Monitor, settings: RunSettings, control: ControlClient | None) -> Endpoint | None:
    """Return where this process reports its health, or None without `--health`."""
    if settings.health is None:
        return None
    if control is not None:
        return Reporter(watch, control.send)
    return endpoint_for_worker(watch, settings.health, settings.stall_timeout)


class _WorkerMain:
    """A worker and what watches it."""

    def __init__(self, tasks: Tasks, settings: RunSettings, control: ControlClient | None, watch: Monitor) -> None:
        self._tasks = tasks
        self._settings = settings
        self._control = control
        self._log = structlog.get_logger("qworker.process").bind(pid=os.getpid())
        self._worker = Worker(tasks, _options(settings))
        self._watch = watch
        if settings.health is not None:
            watch.attach(self._worker)
        self._waits = is_replacement() or settings.wait_for_backend
        self._stopping = asyncio.Event()
        self._signals = 0
        self._recycle = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> _ExitReason:
        """Run the worker to its end."""
        loop = self._loop = asyncio.get_running_loop()
        with Signals(loop, self._on_signal, self._dump_status):
            self._listen(loop)
            outage = Outage("start", self._log, random.random)
            backend = await connect(self._open, waits=self._waits, stopping=self._stopping, outage=outage)
            finished = backend is None or await self._work(backend)
        await self._tasks.aclose()
        if not finished:
            return _ExitReason.TIMED_OUT
        return _ExitReason.RECYCLED if self._wants_recycling() else _ExitReason.FINISHED

    async def _open(self) -> Backend:
        """Reach the store and create the queues: what cannot be used is known before the worker is ready."""
        backend = await self._tasks.backend()
        if self._settings.workers != (1, 1) and not backend.shared:
            raise UsageError(f"{backend.describe()}: queues exist only in one process: leave --workers out")
        return await self._worker.create_queues()

    async def _work(self, backend: Backend) -> bool:
        freeze_loaded_modules()
        if self._control is not None:
            self._control.send(WorkerReady(self._tasks.url, list(self._worker.queues), self._settings.concurrency))
        async with background_tasks(*[partial(run_watcher, watcher, self._log) for watcher in self._watchers(backend)]):
            return await self._worker.run()

    def _wants_recycling(self) -> bool:
        if self._signals:
            return False
        return self._recycle or has_reached(self._settings.max_messages, self._worker.counts)

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._worker.quiet()
            return
        # Under a supervisor a signal may arrive twice, once through the process group: only a command aborts.
        if self._control is not None or not self._signals:
            self._drain()
        else:
            self._worker.cancel_handlers()

    def _drain(self) -> None:
        self._signals += 1
        self._stopping.set()
        self._worker.drain()

    def _abort(self) -> None:
        self._signals += 1
        self._stopping.set()
        self._worker.cancel_handlers()

    def _drain_to_recycle(self, reason: str) -> None:
        if not self._recycle and not self._signals:
            self._log.info("worker_recycling", reason=reason)
            self._recycle = True
            self._stopping.set()
            self._worker.drain()

    def _dump_status(self, frame: FrameType | None) -> None:
        if self._loop is not None:
            # One unbuffered write: this runs between any two instructions, perhaps inside another write to stderr.
            try:
                os.write(2, format_status(self._worker.running_messages(), self._loop, frame).encode())
            except OSError:
                # A handler was interrupted for this. A closed standard error must not end it.
                pass

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._control is None:
            return
        orders: dict[WorkerCommand, Callable[[], None]] = {
            WorkerCommand.DRAIN: self._drain,
            WorkerCommand.ABORT: self._abort,
            WorkerCommand.QUIET: self._worker.quiet,
            WorkerCommand.RECYCLE: partial(self._drain_to_recycle, "the source has changed"),
        }

        def obey(command: WorkerCommand) -> None:
            if command is WorkerCommand.DUMP_STATUS:
                # By the signal, whose Python handler runs even while a handler blocks the loop.
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                _call_soon(loop, orders[command])

        self._control.listen(obey, partial(self._on_orphaned, loop))

    def _on_orphaned(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drain because the supervisor is dead, and end even if a handler blocks the loop. In the listener's thread."""
        _call_soon(loop, self._drain)
        deadline = threading.Timer(self._settings.shutdown_timeout + _ORPHAN_MARGIN_S, os._exit, [ExitStatus.CRASH])
        deadline.daemon = True
        deadline.start()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watchers(self, backend: Backend) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        if telemetry.observe_queues(self._watch.queues) or self._settings.health is not None:
            yield self._watch.pulse.beat
            yield partial(self._watch.sample, backend, self._worker.queues, self._tasks.url)
        if self._settings.max_memory_mb is not None:
            yield partial(watch_memory, self._settings.max_memory_mb, self._drain_to_recycle)
        if self._settings.reload and self._control is None:
            yield partial(watch_sources, self._drain_to_recycle)


def _options(settings: RunSettings) -> WorkerOptions:
    return WorkerOptions(
        queues=settings.queues,
        strict=settings.strict,
        concurrency=settings.concurrency,
        visibility_timeout=settings.visibility,
        shutdown_timeout=settings.shutdown_timeout,
        burst=settings.burst,
        max_messages=settings.max_messages,
        isolated=settings.isolated,
        schedules=settings.schedules,
        started=settings.started,
    )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The loop is closed: the process is already ending.
        return


def _exit_if_threads_remain(status: ExitStatus) -> None:
    """Exit now if a handler's thread still runs: it cannot be cancelled. Its message was released, or will expire."""
    if status is ExitStatus.DRAIN_TIMED_OUT:
        flush_all()
        os._exit(status)
