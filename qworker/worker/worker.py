"""A worker: one process that leases messages and runs their handlers.

    feeder ──► consumers ──► executor ──► settler ──► the store
    (lease)    (deque)       (handlers)   (batches)      ▲
           lease extender: extends, in a thread ─────────┤
                   reaper: returns what has expired ─────┤
                scheduler: enqueues the calls of schedules

Each loop is a module and does not know the others. `WorkerLoops` connects them. This module starts them, and stops them
in order.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal

import anyio
import msgspec
import structlog

from qworker import log_events as events
from qworker.app import Tasks
from qworker.backend import Backend
from qworker.backend.each_queue import can_be_of_one_queue, describe_problem
from qworker.backend.offers import file_system_of
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendError, UsageError
from qworker.failed_call import check_holds
from qworker.kit.task_groups import background_tasks
from qworker.logs import WorkerLog
from qworker.schedules.code import check_deviations
from qworker.worker import telemetry
from qworker.worker.delivery import Delivery, Observer, RunningMessage, WorkerCounts
from qworker.worker.handlers.process_runner import check_importable
from qworker.worker.loops import WorkerLoops
from qworker.worker.metrics import FeatureCounts
from qworker.worker.recorder import Recorder
from qworker.worker.state import WorkerState
from qworker.worker.worker_options import WorkerOptions

__all__ = ["Worker"]

# Seconds that a cancelled handler gets for its clean-up.
_CANCEL_PATIENCE = 5.0
# Seconds that the last settlements get, and the lease extender's thread to come back from the store.
_FLUSH_PATIENCE = 10.0
# Seconds for the same if the store has nothing else to do.
_LAST_PATIENCE = 3.0
# Seconds after which a handler's thread that never waits gives the interpreter's lock to the lease extender. Python's
# own default is 5 ms.
_SWITCH_INTERVAL = 1e-3


class Worker:
    """A worker, which leases the messages of an app's queues and runs their handlers.

    Args:
        tasks: The app. Its backend is the one that handlers enqueue with.
        options: The options of the worker.
        clock: The wall clock and the monotonic clock.
        draw: Returns uniform numbers from [0, 1), for jitter.
    """

    def __init__(
        self,
        tasks: Tasks,
        options: WorkerOptions = WorkerOptions(),  # noqa: B008 - immutable
        *,
        clock: Clock = SYSTEM_CLOCK,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.counts = WorkerCounts()
        self.features = FeatureCounts()
        self.observers: list[Observer] = []
        shares = options.shares
        self.queues = tuple(tasks.queue_names()) if shares is None else tuple(share.name for share in shares)
        if not self.queues:
            raise UsageError("there is nothing to run: register a task or a raw handler, or name a queue")
        for handler in (*tasks.registered_tasks.values(), *tasks.raw_handlers.values()):
            check_importable(handler)
        self._tasks = tasks
        self._options = options
        self._clock = clock
        self._draw = draw
        self._log = WorkerLog(structlog.get_logger("qworker").bind(**{events.WORKER: self.name}))
        self._loops: WorkerLoops | None = None
        self._recorder: Recorder | None = None
        self._has_queues = False
        self._draining = False
        self._aborting = asyncio.Event()
        self._quiet = False

    # -- for signals, on the loop's thread ---------------------------------------------------------------------------

    def drain(self) -> None:
        """Lease nothing more, let running handlers finish, and end. Idempotent."""
        if not self._draining:
            self._draining = True
            self._log.info(events.WORKER_DRAINING, running=len(self.running_messages()))
            if self._loops is not None:
                self._loops.stop_leasing()
                self._loops.notice_stopping()

    def cancel_handlers(self) -> None:
        """Cancel the handlers now and release their messages, tries unchanged. Idempotent."""
        self.drain()
        if not self._aborting.is_set():
            self._log.warning(events.WORKER_ABORTING, running=len(self.running_messages()))
            self._aborting.set()

    def quiet(self) -> None:
        """Lease nothing more, but stay. Idempotent."""
        if not self._quiet:
            self._quiet = True
            self._log.info(events.WORKER_QUIET, running=len(self.running_messages()))
            if self._loops is not None:
                self._loops.quiet()

    @property
    def state(self) -> Literal["starting", "working", "quiet", "draining"]:
        """What the worker does now. From any thread."""
        if self._draining:
            return "draining"
        if self._loops is None:
            return "starting"
        return "quiet" if self._quiet else "working"

    @property
    def running_count(self) -> int:
        """The number of handlers that run now. From any thread."""
        return 0 if self._loops is None else len(self._loops.state.active)

    @property
    def suspect_count(self) -> int:
        """The number of suspects that run in a process of their own, or wait for one. From any thread."""
        return 0 if self._loops is None else len(self._loops.state.suspects)

    def running_messages(self) -> list[RunningMessage]:
        """Return the handlers that run now, oldest first."""
        if self._loops is None:
            return []
        now = self._clock.monotonic()
        return [
            _running_message(delivery, now)
            for delivery in sorted(self._loops.state.active, key=lambda delivery: delivery.started)
        ]

    # -- the life of a worker ----------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Run the worker until it is drained.

        Returns:
            True: every message that was started is finished. False: the grace period ended or `cancel_handlers` was
            called, and the handlers that still ran were cancelled and their messages released.

        Raises:
            BackendError: The store could not be reached at the start.
            Exception: The error that ended a loop. Unfinished messages were released if the store allowed it.
        """
        for task in self._tasks.registered_tasks.values():
            if task.on_failure is not None:
                check_holds(self._tasks.url, task.name)
        backend = await self.create_queues()
        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(switch_interval, _SWITCH_INTERVAL))
        try:
            async with self._lifespan() as lifespan_value:
                return await self._work(backend, lifespan_value)
        finally:
            sys.setswitchinterval(switch_interval)

    async def create_queues(self) -> Backend:
        """Open the store and create the queues. `run` does this itself if it was not done before.

        The loops report a queue that cannot be used, and its messages run when it can.

        Returns:
            The open backend.

        Raises:
            BackendError: The store cannot be used, or none of the queues can be.
            NotSupported: The code has schedules, and the store does not support them.
        """
        backend = await self._tasks.backend()
        if self._options.schedules and self._tasks.schedules.in_code:
            check_deviations(backend.describe().partition(":")[0], backend.deviations)
        if not self._has_queues:
            await self._create_queues(backend)
            self._has_queues = True
        return backend

    async def _create_queues(self, backend: Backend) -> None:
        failed: dict[str, BackendError] = {}
        for queue in self.queues:
            try:
                await backend.create(queue)
            except BackendError as error:
                if not can_be_of_one_queue(backend, error):
                    raise
                failed[queue] = error
        if len(failed) == len(self.queues):
            raise next(iter(failed.values()))
        for queue, reason in failed.items():
            self._log.warning(events.QUEUE_UNUSABLE, queue=queue, error=describe_problem(reason))

    def _lifespan(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext() if self._tasks.lifespan is None else self._tasks.lifespan(self._tasks)

    async def _work(self, backend: Backend, lifespan_value: Any) -> bool:
        loops = self._start(backend, lifespan_value)
        finished = False
        try:
            async with background_tasks(*loops.background()):
                await loops.before_leasing()
                await loops.feeder.run()
                finished = await self._finish(loops)
        finally:
            with anyio.CancelScope(shield=True):
                await self._stop(loops)
        return finished

    def _start(self, backend: Backend, lifespan_value: Any) -> WorkerLoops:
        # The lifespan may have configured OpenTelemetry.
        self.observers.extend(telemetry.observers(self.features))
        options = self._options
        state = WorkerState(
            app=self._tasks,
            backend=backend,
            queues=self.queues,
            options=options,
            clock=self._clock,
            draw=self._draw,
            log=self._log,
            counts=self.counts,
            features=self.features,
            observers=self.observers,
            lifespan_value=lifespan_value,
            quiet=self._quiet,
        )
        state.listener = self._recorder = self._create_recorder(state)
        loops = self._loops = WorkerLoops(state)
        loops.lease_extender.start()
        if self._draining:
            loops.stop_leasing()
            loops.notice_stopping()
        file_system = file_system_of(backend)
        more: dict[str, str] = {}
        if file_system is not None:
            more["file_system"] = file_system
        self._log.info(
            events.WORKER_STARTED,
            backend=backend.describe(),
            **more,
            queues=list(self.queues),
            concurrency=options.concurrency,
            visibility_timeout=options.visibility_timeout,
        )
        return loops

    def _create_recorder(self, state: WorkerState) -> Recorder | None:
        backend = state.backend
        if not backend.history.enabled:
            return None
        return Recorder(
            backend.history.append,
            state.held,
            state.queues,
            self.name,
            clock=state.clock,
            log=state.log,
            texts="retry_errors" in backend.deviations,
        )

    # The order of the end. A drained worker goes through `_finish` and `_stop`, one whose loop has failed through
    # `_stop`.

    async def _finish(self, loops: WorkerLoops) -> bool:
        # 1. The feeder has stopped: nothing more is leased.
        self.drain()
        # 2. Messages that have not started are released, their tries unchanged.
        loops.release_waiting()
        # 3. Handlers finish within the grace period. Meanwhile leases are extended and outcomes settled.
        finished = await loops.wait_for_handlers(self._options.shutdown_timeout, self._aborting)
        # 4. Handlers that still run are cancelled and their messages released, their tries unchanged.
        ended = await loops.cancel_handlers(_CANCEL_PATIENCE)
        # 5. The last outcomes reach the store.
        flushed = await loops.settler.flush(_FLUSH_PATIENCE)
        return finished and ended and flushed

    async def _stop(self, loops: WorkerLoops) -> None:
        try:
            if not loops.consumers.is_closed:
                await loops.cancel_handlers(_CANCEL_PATIENCE)
            await loops.settler.last_flush(_LAST_PATIENCE)
        finally:
            # 6. No lease is extended from here on. The reaper has stopped with the loops.
            await loops.lease_extender.stop(_FLUSH_PATIENCE)
            await loops.close_runners()
            await loops.state.providers.aclose()
            if self._recorder is not None:
                self._recorder.close()
            # 7. The lifespan is left last, by `run`.
            self._log.info(events.WORKER_STOPPED, **msgspec.structs.asdict(self.counts))


def _running_message(delivery: Delivery, now: float) -> RunningMessage:
    message = delivery.lease.message
    return RunningMessage(
        message_id=message.id,
        task=delivery.task,
        queue=message.queue,
        tries=message.tries,
        token=delivery.lease.token,
        started=delivery.started,
        lease_remaining=delivery.expires - now,
        progress_text=None if delivery.context is None else delivery.context.progress_text,
    )
