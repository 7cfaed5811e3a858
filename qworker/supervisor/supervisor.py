"""The supervisor: starts worker processes, replaces those that die, and hands on what it is told.

It runs no user code and imports no app, so that nothing but its own code can end it. All of its state changes in `_step`, which runs
after each event and at each deadline. Under a container's first process id it reaps every orphan, as an init does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from qworker.backend.registry import open_backend
from qworker.errors import BackendError
from qworker.health.answers import HealthAnswers, WorkerReports
from qworker.health.endpoint import HttpEndpoint
from qworker.health.monitor import LoopHeartbeat
from qworker.logs import configure
from qworker.supervisor.control_socket import Command, Ready
from qworker.supervisor.reexec import deliver_signals
from qworker.supervisor.run_settings import Exit, RunSettings
from qworker.supervisor.scaling import Scaler
from qworker.supervisor.source_watcher import changes
from qworker.supervisor.worker_process import Child, Slot

__all__ = ["Supervisor"]

# Seconds beyond the grace period after which a process that has not ended is killed.
_KILL_MARGIN_S = 10.0
# The same after a second signal.
_ABORT_MARGIN_S = 15.0
# Seconds between two looks at the backlog; more where a look takes long, so that looking costs at most 2 %.
_LOOK_EVERY_S = 2.0
_LOOK_SHARE = 0.02


class Supervisor:
    """Runs between `settings.workers[0]` and `settings.workers[1]` worker processes until it is told to stop."""

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
        # Monotonic seconds at which whoever is left is killed; None: nobody was told to stop.
        self._kill_at: float | None = None
        self._signals = 0
        self._status = Exit.CLEAN
        self._ever_ready = False
        # The status is that of the first process, which could not start.
        self._gave_up = False
        self._helpers: set[asyncio.Task[None]] = set()
        self._fleet = WorkerReports(now)
        self._pulse = LoopHeartbeat(now)

    def run(self) -> Exit:
        """Supervise.

        Returns:
            CLEAN; the first process's own status when it could not even start; DRAIN_TIMED_OUT when one had to be killed or said
            so itself; CRASH when one crashed while it was stopping.
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

    async def _run(self) -> Exit:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_stop)
        loop.add_signal_handler(signal.SIGTSTP, self._tell_all, Command.QUIET)
        loop.add_signal_handler(signal.SIGUSR1, self._tell_all, Command.REPORT)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        # Whoever started this process may have blocked them.
        deliver_signals()
        if self._settings.reload:
            self._start(self._watch_sources())
        if self._settings.health is not None:
            self._start(self._pulse.beat())
        self._log.info("supervisor_started", workers=list(self._settings.workers))
        try:
            while self._step(loop):
                await self._sleep()
        finally:
            await self._end_helpers()
        self._log.info("supervisor_stopped", status=int(self._status))
        return self._status

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Reap, start and kill what is due; False when nothing is left to supervise."""
        self._reap()
        now = self._now()
        if self._kill_at is None:
            self._fill(loop, now)
            return not all(slot.finished for slot in self._slots)
        if now >= self._kill_at:
            self._kill_all()
        return any(slot.child is not None for slot in self._all())

    async def _sleep(self) -> None:
        deadlines = (
            [self._kill_at] if self._kill_at is not None else [s.not_before for s in self._slots if s.child is None]
        )
        pause = min((at - self._now() for at in deadlines), default=None)
        try:
            async with asyncio.timeout(None if pause is None else max(pause, 0.01)):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _fill(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        self._resize()
        for slot in self._slots:
            if slot.child is None and not slot.finished and now >= slot.not_before:
                slot.child = Child(loop, self._now, self._ready, self._fleet.add_report)
                self._log.info("worker_process_started", slot=slot.number, pid=slot.child.pid)

    def _resize(self) -> None:
        """Have as many slots as the scaler says; those beyond are retired when their process has drained."""
        while len(self._slots) < self._scaler.target:
            self._slots.append(Slot(len(self._slots)))
        while len(self._slots) > self._scaler.target:
            slot = self._slots.pop()
            if slot.child is not None:
                slot.child.tell(Command.DRAIN)
                self._retired.append(slot)

    def _all(self) -> list[Slot]:
        return [*self._slots, *self._retired]

    # -- processes that end ------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take every child that has died, ours and, as an init, those that were left to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            slot = next((s for s in self._all() if s.child is not None and s.child.pid == pid), None)
            if slot is None:
                self._log.debug("orphan_reaped", pid=pid)
            else:
                self._ended(slot, os.waitstatus_to_exitcode(status))

    def _ended(self, slot: Slot, code: int) -> None:
        child = slot.child
        assert child is not None
        child.reaped(code)
        self._fleet.remove_process(child.pid)
        crashed = code not in {Exit.CLEAN, Exit.DRAIN_TIMED_OUT}
        say = self._log.error if crashed else self._log.info
        say("worker_process_ended", slot=slot.number, pid=child.pid, **_cause(code))
        delay = slot.emptied(self._now(), crashed=crashed, draw=self._draw())
        if slot in self._retired:
            self._retired.remove(slot)
        if self._kill_at is not None or child.ending:
            self._worsen(code)
        elif self._settings.burst and not crashed:
            slot.finished = True
            self._worsen(code)
        elif code in {Exit.USAGE, Exit.UNREACHABLE} and not self._ever_ready:
            self._give_up(slot, Exit(code))
        elif crashed:
            self._log.info("worker_process_restart_scheduled", slot=slot.number, delay_s=round(delay, 3))

    def _worsen(self, code: int) -> None:
        """Keep the worst status of those that were to end: a crash, then a drain that timed out."""
        if self._gave_up:
            return
        if code in {Exit.DRAIN_TIMED_OUT, -signal.SIGKILL}:
            if self._status is Exit.CLEAN:
                self._status = Exit.DRAIN_TIMED_OUT
        elif code != Exit.CLEAN:
            self._status = Exit.CRASH

    def _give_up(self, slot: Slot, status: Exit) -> None:
        """What keeps a process from its first start keeps the others from theirs: end, unless a change of the source may fix it."""
        if status is Exit.USAGE and self._settings.reload:
            slot.not_before = float("inf")
            self._log.info("waiting_for_source_change", slot=slot.number)
            return
        self._status = status
        self._gave_up = True
        self._stop(Command.DRAIN, _KILL_MARGIN_S)

    # -- being told --------------------------------------------------------------------------------------------------

    def _ready(self, ready: Ready) -> None:
        if not self._ever_ready and self._scaler.least < self._scaler.most:
            self._start(self._watch_backlog(ready))
        self._ever_ready = True

    def _told_to_stop(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._stop(Command.DRAIN, self._settings.shutdown_timeout + _KILL_MARGIN_S)
        else:
            self._stop(Command.ABORT, _ABORT_MARGIN_S)

    def _stop(self, command: Command, within: float) -> None:
        self._log.info("supervisor_stopping", action=command.name.lower())
        self._tell_all(command)
        kill_at = self._now() + within
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._changed.set()

    def _tell_all(self, command: Command) -> None:
        for slot in self._all():
            if slot.child is not None:
                slot.child.tell(command)

    def _kill_all(self) -> None:
        self._kill_at = float("inf")
        for slot in self._all():
            if slot.child is not None:
                self._log.error("worker_process_killed", slot=slot.number, pid=slot.child.pid)
                slot.child.kill()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _start(self, helper: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(helper)
        self._helpers.add(task)
        task.add_done_callback(self._helper_ended)

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        self._helpers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("watcher_failed", error=repr(error))

    async def _end_helpers(self) -> None:
        helpers = list(self._helpers)
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)

    async def _watch_sources(self) -> None:
        async for names in changes():
            self._log.info("worker_reloading", changed=names[:3])
            self._tell_all(Command.RECYCLE)
            for slot in self._slots:
                slot.not_before = 0.0
            self._changed.set()

    async def _watch_backlog(self, ready: Ready) -> None:
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
