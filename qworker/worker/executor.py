"""The executor: one message from its lease to its outcome, in named steps: resolve, validate, run, decide."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Protocol

from qworker import log_events as events
from qworker.app import Tasks
from qworker.clock import Clock
from qworker.context import Context
from qworker.decision import Fail, Retry, outcome_of
from qworker.definition.callables import unrun
from qworker.envelope import Envelope, open_envelope
from qworker.errors import InvalidArguments
from qworker.failure_text import failure_text, summary_of
from qworker.logs import RUNNING
from qworker.message import SettleAction
from qworker.names import printable
from qworker.parcel import unpack
from qworker.retry import DEFAULT_BACKOFF, MOST_DELAY, Backoff
from qworker.task import Handler
from qworker.worker.delivery import CancelReason, Delivery, Observer

__all__ = ["Executor", "Runner"]

# Seconds that a message which nobody here knows stays away from this queue's workers.
_UNKNOWN_DELAY = 10.0
# So many names are warned of: names come from outside.
_MOST_WARNINGS = 1000


class Runner(Protocol):
    """Runs handlers somewhere else than on the loop."""

    async def run(self, run: Delivery) -> BaseException | None:
        """What the handler raised, or None."""
        ...


class Executor:
    """Decides how messages end.

    Args:
        tasks: the app.
        active: the runs whose handler is at work.
        runners: by the handler's kind, for those that do not run on the loop.
        state: what the app's lifespan yielded.
        observers: are told of each start.
        clock: both clocks.
        draw: uniform numbers from [0, 1), for the backoff's jitter.
        log: the worker's logger.
    """

    def __init__(
        self,
        tasks: Tasks,
        active: set[Delivery],
        *,
        runners: Mapping[str, Runner],
        state: Any,
        observers: list[Observer],
        clock: Clock,
        draw: Callable[[], float],
        log: Any,
    ) -> None:
        self._tasks = tasks
        self._active = active
        self._runners = runners
        self._state = state
        self._observers = observers
        self._clock = clock
        self._draw = draw
        self._log = log
        self._warned: set[str] = set()

    # -- before ------------------------------------------------------------------------------------------------------

    def prepare(self, run: Delivery) -> bool:
        """Resolve and validate; False: nothing is to be run, and the settlement is decided."""
        try:
            return self._resolve(run) and self._has_tries_left(run)
        except BaseException as problem:  # noqa: BLE001 - an annotation's own code, a body that no memory is left for
            self._contain(run, problem)
            return False

    def last_chance(self, run: Delivery) -> bool:
        """Whether one more failure is the last: if this message kills workers, it must not take neighbours along."""
        tries = run.lease.message.tries
        return tries >= 1 and run.handler is not None and tries >= run.handler.options.max_tries - 1

    def _resolve(self, run: Delivery) -> bool:
        message = run.lease.message = unpack(run.lease.message)
        opened = open_envelope(message.body)
        if type(opened) is Envelope:
            task = self._tasks.registered_tasks.get(opened.task)
            if task is not None:
                run.handler = task
                run.task = task.name
                run.headers = opened.headers
                return self._validate(run, task, opened)
        raw = self._tasks.raw_handlers.get(message.queue)
        if isinstance(opened, tuple) and (opened[0] in self._tasks.registered_tasks or raw is None):
            run.task = opened[0]
            if opened[0] in self._tasks.registered_tasks:
                run.settle(SettleAction.FAIL_PERM, error=f"invalid envelope: {opened[1]}")
                return False
        elif raw is not None:
            run.handler = raw
            run.task = raw.name
            run.args = [message]
            return True
        elif isinstance(opened, Envelope):
            run.task = opened.task
        return self._unknown(run)

    def _validate(self, run: Delivery, task: Handler, envelope: Envelope) -> bool:
        try:
            run.args, run.kwargs = task.signature.convert(envelope.args, envelope.kwargs)
        except InvalidArguments as error:
            run.error = error
            run.settle(SettleAction.FAIL_PERM, error=str(error))
            return False
        return True

    def _unknown(self, run: Delivery) -> bool:
        """Leave it in the queue: another release of the app may know it."""
        queue = run.lease.message.queue
        name = run.task or f"(no envelope on {queue})"
        if name not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
            self._log.warning(events.UNKNOWN_TASK, **{events.TASK: printable(run.task), events.QUEUE: queue})
        run.settle(SettleAction.RELEASE, delay=_UNKNOWN_DELAY)
        return False

    def _has_tries_left(self, run: Delivery) -> bool:
        tries = run.lease.message.tries
        if tries == 0 or run.handler is None:
            return True
        allowed = run.handler.options.max_tries
        if tries < allowed:
            return True
        run.settle(
            SettleAction.FAIL_PERM,
            error=f"max_tries reached ({tries} of {allowed}). The last worker died or its lease expired, so this message may be"
            " killing its workers. It was not run again.",
        )
        return False

    # -- the run -----------------------------------------------------------------------------------------------------

    async def run(self, run: Delivery, consumer: asyncio.Task[None]) -> None:
        """Run the handler of a prepared message and decide its outcome: afterwards it has a settlement, or is lost."""
        handler = run.handler
        if handler is None or run.stop is not None:
            self._decide(run)
            return
        run.started = self._clock.monotonic()
        self._active.add(run)
        if self._observers:
            self._tell_started(run)
        run.consumer = consumer
        # Processes are waited for: their time begins when they have one.
        timeout = handler.options.timeout if handler.kind != "process" else None
        timer = None if timeout is None else consumer.get_loop().call_later(timeout, run.cancel, CancelReason.TIMEOUT)
        # The handler's context is a copy of this one. It stays until the next one, or until the consumer rests.
        RUNNING.set(run)
        try:
            run.error = await self._call(run, handler)
        except GeneratorExit:
            # The loop has closed under the consumer.
            raise
        except BaseException as error:  # noqa: BLE001 - it cannot be called, or no thread is to be had: its message's outcome
            # Or a cancellation of a call that waits for a thread or process, or a stray one: see `absorb_cancels`.
            run.error = error
        finally:
            run.consumer = None
            if timer is not None:
                timer.cancel()
            self._active.discard(run)
            if run.context is not None and run.leftover is None:
                # It refers to its run: without the way back, no garbage is left for the collector.
                run.context, run.args = None, []
        run.duration = self._clock.monotonic() - run.started
        self._decide(run)

    def _call(self, run: Delivery, handler: Handler) -> Awaitable[BaseException | None]:
        if handler.takes_context and handler.kind != "process":
            run.context = self._context(run, handler)
            run.args.insert(0, run.context)
        if handler.kind == "async":
            return _HandlerCall(handler.function(*run.args, **run.kwargs))
        return self._runners[handler.kind].run(run)

    def _context(self, run: Delivery, handler: Handler) -> Context:
        timeout = handler.options.timeout
        return Context(
            message=run.lease.message,
            task=run.task,
            token=run.lease.token,
            deadline=None if timeout is None else self._clock.time() + timeout,
            headers=run.headers,
            state=self._state,
            max_tries=handler.options.max_tries,
            lease_lost=functools.partial(_is_lost, run, self._clock),
        )

    def _tell_started(self, run: Delivery) -> None:
        for observer in self._observers:
            try:
                observer.handler_started(run)
            except Exception as problem:  # noqa: BLE001 - whoever watches must not stop the work
                self._log.error(
                    events.OBSERVER_FAILED,
                    **{events.ERROR_TYPE: type(problem).__name__, events.ERROR: summary_of(problem)},
                )

    # -- after -------------------------------------------------------------------------------------------------------

    def _decide(self, run: Delivery) -> None:
        error = run.error
        try:
            if run.stop is not None:
                self._decide_stopped(run, run.stop)
            elif error is None:
                run.settle(SettleAction.ACK)
            elif isinstance(error, Fail):
                run.settle(SettleAction.FAIL_PERM, error=outcome_of(error)[0])
            elif isinstance(error, Retry):
                reason, delay = outcome_of(error)
                self._fail(run, reason, delay=delay)
            else:
                self._fail(run, failure_text(error))
        except BaseException as problem:  # noqa: BLE001 - of a subclass of Retry, or a backoff: the message fails, not its neighbours
            self._contain(run, problem)

    def _contain(self, run: Delivery, problem: BaseException) -> None:
        """What goes wrong beside a handler is a failure of its message."""
        if run.error is not None and problem.__context__ is None:
            problem.__context__ = run.error
        run.error = problem
        self._fail(run, failure_text(problem), DEFAULT_BACKOFF)

    def _decide_stopped(self, run: Delivery, stop: CancelReason) -> None:
        if stop is CancelReason.TIMEOUT and run.handler is not None:
            run.error = TimeoutError(f"timed out after {run.handler.options.timeout:g} seconds")
            self._fail(run, str(run.error))
        elif stop is not CancelReason.LOST:
            # Nothing that a handler returns after its cancellation counts: it may have been cut short.
            run.settle(SettleAction.RELEASE)

    def _fail(self, run: Delivery, reason: str, backoff: Backoff | None = None, *, delay: float | None = None) -> None:
        if run.handler is None:
            run.settle(SettleAction.FAIL_PERM, error=reason)
            return
        options = run.handler.options
        tries = run.lease.message.tries + 1
        if tries >= options.max_tries:
            run.settle(SettleAction.FAIL_PERM, error=reason)
            return
        if delay is None:
            delay = (backoff or options.backoff).delay(tries, self._draw())
        run.settle(SettleAction.FAIL_TMP, delay=min(max(0.0, delay), MOST_DELAY), error=reason)


async def absorb_cancels(consumer: asyncio.Task[None]) -> None:
    """Forget cancellations that were meant for a handler, so that the consumer's next message does not get them."""
    try:
        # A handler that cancels its own task and returns leaves one that has not been delivered yet.
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        pass
    while consumer.cancelling():
        consumer.uncancel()


class _HandlerCall:
    """Runs a handler's coroutine inside the consumer's task, in a copy of its context, and returns what it raised.

    A task per message would do the same and cost several times as much. Context variables that a handler sets are gone with it.
    """

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, BaseException | None]:
        coroutine = self._coroutine
        enter = contextvars.copy_context().run
        step: Callable[[Any], Any] = coroutine.send
        sent: Any = None
        while True:
            try:
                waiting = enter(step, sent)
            except StopIteration as end:
                return None if end.value is None else unrun(end.value)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
                return error
            try:
                sent = yield waiting
                step = coroutine.send
            except GeneratorExit:
                enter(coroutine.close)
                raise
            except BaseException as thrown:  # noqa: BLE001 - a cancellation, for the handler
                sent = thrown
                step = coroutine.throw


def _is_lost(run: Delivery, clock: Clock) -> bool:
    return run.is_lost(clock.monotonic())
