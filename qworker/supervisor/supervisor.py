"""The supervisor: starts worker processes, replaces those that die, and forwards signals to them.

It runs no user code and imports no app, so only its own code can end it. All of its state changes in `_step`, which
runs after each event and at each deadline. As the first process of a container it reaps every orphan, as an init does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup

from qworker.backend.registry import open_backend
from qworker.errors import BackendError
from qworker.health.answers import HealthAnswers, WorkerReports
from qworker.health.endpoint import HttpEndpoint
from qworker.health.monitor import LoopHeartbeat
from qworker.kit.task_groups import background_tasks
from qworker.logs import configure
from qworker.supervisor.control_socket import WorkerCommand, WorkerReady
from qworker.supervisor.reexec import deliver_signals
from qworker.supervisor.run_settings import ExitStatus, RunSettings
from qworker.supervisor.scaling import Scaler
from qworker.supervisor.source_watcher import watch_files
from qworker.supervisor.watcher import run_watcher
from qworker.supervisor.worker_process import Slot, WorkerProcess

__all__ = ["Supervisor"]

# Seconds beyond the grace period after which a process that has not ended is killed.
_KILL_MARGIN_S = 10.0
# Seconds after a second signal until a process that has not ended is killed.
_ABORT_MARGIN_S = 15.0
# Seconds between two checks of the backlog. More if a check takes long, so that they cost at most 2 % of the time.
_LOOK_EVERY_S = 2.0
_LOOK_SHARE = 0.02


class Supervisor:
    """Runs between `settings.workers[0]` and `settings.workers[1]` worker processes until it is stopped."""

    def __init__(
        self,
        settings: RunSettings,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._now = now
        self._draw = draw
        self._log: Any = structlog.get_logger("qworker.supervisor")
        least, most = settings.workers
        self._scaler = Scaler(least, most, settings.concurrency)
        self._slots = [Slot(number) for number in range(least)]
        self._retired: list[Slot] = []
        self._changed = asyncio.Event()
        # Monotonic seconds at which the remaining processes are killed. None: the supervisor is not stopping.
        self._kill_at: float | None = None
        self._signals = 0
        self._status = ExitStatus.CLEAN
        self._ever_ready = False
        # Whether the status is that of the first process, which could not start.
        self._gave_up = False
        self._watchers: TaskGroup | None = None
        self._fleet = WorkerReports(now)
        self._pulse = LoopHeartbeat(now)

    def run(self) -> ExitStatus:
        """Supervise.

        Returns:
            CLEAN. The status of the first process if it could not start. DRAIN_TIMED_OUT if a process had to be killed
            or ended with this status. CRASH if one crashed while it was stopping.
        """
        configure(self._settings.log_json, self._settings.log_level)
        self._log = self._log.bind(supervisor=os.getpid())
        port = None if self._settings.health is None else HttpEndpoint(self._settings.health, self._view())
        try:
            return asyncio.run(self._run())
        finally:
            if port is not None:
                port.close()

    def _view(self) -> HealthAnswers:
        return HealthAnswers(
            self._fleet.reports,
            stall_timeout=self._settings.stall_timeout,
            past=self._fleet.past_counts,
            stopping=lambda: self._kill_at is not None,
            stalled=self._pulse.stalled_seconds,
            own_metrics=False,
        )

    async def _run(self) -> ExitStatus:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._handle_stop)
        loop.add_signal_handler(signal.SIGTSTP, self._send_all, WorkerCommand.QUIET)
        loop.add_signal_handler(signal.SIGUSR1, self._send_all, WorkerCommand.DUMP_STATUS)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        # The parent process may have blocked them.
        deliver_signals()
        async with background_tasks() as self._watchers:
            if self._settings.reload:
                self._start(self._watch_sources)
            if self._settings.health is not None:
                self._start(self._pulse.beat)
            self._log.info("supervisor_started", workers=list(self._settings.workers))
            while self._step(loop):
                await self._sleep()
        self._log.info("supervisor_stopped", status=int(self._status))
        return self._status

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Reap, start and kill the processes that are due. Return False if none is left to supervise."""
        self._reap()
        now = self._now()
        if self._kill_at is None:
            self._fill(loop, now)
            return not all(slot.finished for slot in self._slots)
        if now >= self._kill_at:
            self._kill_all()
        return any(slot.process is not None for slot in self._all())

    async def _sleep(self) -> None:
        deadlines = (
            [self._kill_at] if self._kill_at is not None else [s.not_before for s in self._slots if s.process is None]
        )
        pause = min((at - self._now() for at in deadlines), default=None)
        with anyio.move_on_after(None if pause is None else max(pause, 0.01)):
            await self._changed.wait()
        self._changed.clear()

    def _fill(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        self._resize()
        for slot in self._slots:
            if slot.process is None and not slot.finished and now >= slot.not_before:
                slot.process = WorkerProcess(
                    loop, self._now, self._on_ready, self._fleet.add_report, self._settings.started
                )
                self._log.info("worker_process_started", slot=slot.number, pid=slot.process.pid)

    def _resize(self) -> None:
        """Adjust the number of slots to the scaler's target. Excess slots retire when their process has drained."""
        while len(self._slots) < self._scaler.target:
            self._slots.append(Slot(len(self._slots)))
        while len(self._slots) > self._scaler.target:
            slot = self._slots.pop()
            if slot.process is not None:
                slot.process.send(WorkerCommand.DRAIN)
                self._retired.append(slot)

    def _all(self) -> list[Slot]:
        return [*self._slots, *self._retired]

    # -- processes that end ------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap every child process that has died: our own and, as an init, orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = next((s for s in self._all() if s.process is not None and s.process.pid == pid), None)
            if slot is None:
                self._log.debug("orphan_reaped", pid=pid)
            else:
                self._on_process_exit(slot, os.waitstatus_to_exitcode(status))

    def _on_process_exit(self, slot: Slot, code: int) -> None:
        process = slot.process
        assert process is not None
        process.mark_reaped(code)
        self._fleet.remove_process(process.pid)
        crashed = code not in {ExitStatus.CLEAN, ExitStatus.DRAIN_TIMED_OUT}
        say = self._log.error if crashed else self._log.info
        say("worker_process_ended", slot=slot.number, pid=process.pid, **_cause(code))
        delay = slot.on_process_exit(self._now(), crashed=crashed, draw=self._draw())
        if slot in self._retired:
            self._retired.remove(slot)
        if self._kill_at is not None or process.ending:
            self._keep_worst_status(code)
        elif self._settings.burst and not crashed:
            slot.finished = True
            self._keep_worst_status(code)
        elif code in {ExitStatus.USAGE, ExitStatus.UNREACHABLE} and not self._ever_ready:
            self._give_up(slot, ExitStatus(code))
        elif crashed:
            self._log.info("worker_process_restart_scheduled", slot=slot.number, delay_s=round(delay, 3))

    def _keep_worst_status(self, code: int) -> None:
        """Keep the worst status of those that were to end: a crash, then a drain that timed out."""
        if self._gave_up:
            return
        if code in {ExitStatus.DRAIN_TIMED_OUT, -signal.SIGKILL}:
            if self._status is ExitStatus.CLEAN:
                self._status = ExitStatus.DRAIN_TIMED_OUT
        elif code != ExitStatus.CLEAN:
            self._status = ExitStatus.CRASH

    def _give_up(self, slot: Slot, status: ExitStatus) -> None:
        """End, because no other process could start either. With --reload, wait for a change of the source instead."""
        if status is ExitStatus.USAGE and self._settings.reload:
            slot.not_before = float("inf")
            self._log.info("waiting_for_source_change", slot=slot.number)
            return
        self._status = status
        self._gave_up = True
        self._stop(WorkerCommand.DRAIN, _KILL_MARGIN_S)

    # -- events ------------------------------------------------------------------------------------------------------

    def _on_ready(self, ready: WorkerReady) -> None:
        if not self._ever_ready and self._scaler.least < self._scaler.most:
            self._start(partial(self._watch_backlog, ready))
        self._ever_ready = True

    def _handle_stop(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._stop(WorkerCommand.DRAIN, self._settings.shutdown_timeout + _KILL_MARGIN_S)
        else:
            self._stop(WorkerCommand.ABORT, _ABORT_MARGIN_S)

    def _stop(self, command: WorkerCommand, within: float) -> None:
        self._log.info("supervisor_stopping", action=command.name.lower())
        self._send_all(command)
        kill_at = self._now() + within
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._changed.set()

    def _send_all(self, command: WorkerCommand) -> None:
        for slot in self._all():
            if slot.process is not None:
                slot.process.send(command)

    def _kill_all(self) -> None:
        self._kill_at = float("inf")
        for slot in self._all():
            if slot.process is not None:
                self._log.error("worker_process_killed", slot=slot.number, pid=slot.process.pid)
                slot.process.kill()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _start(self, watcher: Callable[[], Coroutine[Any, Any, None]]) -> None:
        assert self._watchers is not None
        self._watchers.start_soon(run_watcher, watcher, self._log)

    async def _watch_sources(self) -> None:
        async for names in watch_files():
            self._log.info("worker_reloading", changed=names[:3])
            self._send_all(WorkerCommand.RECYCLE)
            for slot in self._slots:
                slot.not_before = 0.0
            self._changed.set()

    async def _watch_backlog(self, ready: WorkerReady) -> None:
        backend = open_backend(ready.url)
        try:
            while True:
                began = self._now()
                try:
                    stats = [await backend.stats(queue) for queue in ready.queues]
                except BackendError as error:
                    self._log.warning("backlog_check_failed", error=str(error))
                else:
                    backlog = sum(s.ready + s.leased for s in stats if not s.paused)
                    self._scale(backlog)
                await asyncio.sleep(max(_LOOK_EVERY_S, (self._now() - began) / _LOOK_SHARE))
        finally:
            with anyio.CancelScope(shield=True):
                await backend.aclose()

    def _scale(self, backlog: int) -> None:
        before = self._scaler.target
        target = self._scaler.observe(backlog, self._now())
        if target != before:
            self._log.info("workers_scaled", backlog=backlog, workers=target)
            self._changed.set()


def _cause(code: int) -> dict[str, Any]:
    if code >= 0:
        return {"status": code}
    try:
        return {"signal": signal.Signals(-code).name}
    except ValueError:
        return {"signal": -code}
