"""The executor: takes one message from its lease to its outcome, in named steps: resolve, validate, run, decide."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from qworker import log_events as events
from qworker.attempt.runner import AttemptRunner
from qworker.clock import Clock
from qworker.context import CancelReason, Context, Stopping
from qworker.decision import Fail, Retry, outcome_of
from qworker.definition.task_options import DEFAULT_MAX_TRIES
from qworker.envelope import Envelope, open_envelope
from qworker.errors import InvalidArguments
from qworker.failure_text import FailureCode, NotBegun, ProcessDied, failure_text, summary_of
from qworker.jobs.records import Progress
from qworker.logs import RUNNING
from qworker.message import SettleAction
from qworker.names import printable
from qworker.parcel import unpack
from qworker.retry import DEFAULT_BACKOFF, MOST_DELAY, NoRetry, RetryPolicy
from qworker.task import Handler
from qworker.worker.delivery import Delivery, expiry_margin
from qworker.worker.failure_reports import FailureReports
from qworker.worker.job_records import JobRecords
from qworker.worker.misfits import Misfits
from qworker.worker.releases import Releases
from qworker.worker.state import WorkerState

__all__ = ["Executor", "Runner"]

# Seconds until a message can be leased again whose handler the worker could not call.
_RELEASE_DELAY = 10.0
# Seconds for which a worker that could not call a handler leaves the queue to others. Otherwise it would take all of it
# and return it.
_REST = 1.0
# Seconds for which the processes of suspects may fail to start a task. Then its suspects run in the worker: its deaths
# are counted, while a message that is only released would wait for ever.
_ISOLATION_PATIENCE = 600.0
# A message without `max_tries` fails after this many attempts in a row that killed their process or lost their lease.
_MOST_DEATHS = DEFAULT_MAX_TRIES
_UNKNOWN_HINT = (
    "if another app shares this queue, give each app its own queue (queue=...);"
    " otherwise import the module that has the task, such as with Tasks(imports=...)"
)
_MISFIT_HINT = "it is tried again for a time (Tasks(unknown_for=...)), because a deploy may be running"
# The limit of logged names, because names come from outside.
_MOST_WARNINGS = 1000


class Runner(Protocol):
    """Runs handlers in a thread or a process."""

    async def run(self, delivery: Delivery) -> BaseException | None:
        """Run the handler. Return what it raised, or None: then `delivery.result` is its value, if that is wanted."""
        ...


class Executor:
    """Decides how messages end.

    Args:
        state: The state of the worker.
        runners: The runners of threads and processes, by the handler's kind.
    """

    def __init__(self, state: WorkerState, runners: Mapping[str, Runner]) -> None:
        self._tasks = state.app
        self._active = state.active
        self._runners = runners
        self._lifespan_value = state.lifespan_value
        self._stopping = state.stopping
        self._observers = state.observers
        self._clock = state.clock
        self._store_clock = state.store_clock
        self._margin = expiry_margin(state.options.visibility_timeout)
        self._draw = state.draw
        self._log = state.log
        self._warned: set[str] = set()
        self._events = state.events
        self._releases = Releases(state.draw)
        self._features = state.features
        self._misfits = Misfits(state)
        self._counts_deaths = "deaths" not in state.backend.deviations
        self._records = state.records
        self._keeps_results = "cells" not in state.backend.deviations
        self._waits = state.waits
        self._has_isolated = "isolated" in runners
        # Since when the processes of suspects fail to start each task.
        self._isolation_fails_since: dict[str, float] = {}
        self._providers = state.providers
        self.report_failure = FailureReports(state).store

    # -- before ------------------------------------------------------------------------------------------------------

    def prepare(self, delivery: Delivery) -> bool:
        """Resolve and validate. Return False if no handler is to run.

        Then the settlement is decided. Without one, the arguments do not fit: `decide_misfit` decides.
        """
        try:
            return self._resolve(delivery) and self._has_tries_left(delivery)
        except BaseException as problem:  # noqa: BLE001 - an annotation's own code, a body that no memory is left for
            self._contain(delivery, problem)
            return False

    def is_suspect(self, delivery: Delivery) -> bool:
        """Return whether the message may kill its process, and its handler can run in another one.

        If the store does not count deaths, every message on its last try may.
        """
        message = delivery.lease.message
        handler = delivery.handler
        if not message.tries or handler is None or handler.kind == "process" or not self._can_isolate(handler):
            return False
        if message.deaths or self._counts_deaths:
            return message.deaths > 0
        allowed = delivery.max_tries
        return allowed is not None and message.tries >= allowed - 1

    def _can_isolate(self, handler: Handler) -> bool:
        since = self._isolation_fails_since.get(handler.name)
        return self._has_isolated and (since is None or self._clock.monotonic() < since + _ISOLATION_PATIENCE)

    def _resolve(self, delivery: Delivery) -> bool:
        message = delivery.lease.message = unpack(delivery.lease.message)
        opened = open_envelope(message.body)
        if type(opened) is Envelope:
            task = self._tasks.registered_tasks.get(opened.task)
            if task is not None:
                delivery.handler = task
                delivery.task = task.name
                delivery.headers = opened.headers
                options = opened.options
                if options is not None and options.max_tries is None and not self._counts_deaths:
                    # From another store. Without a limit, a message that kills its worker would run for ever here.
                    options = msgspec.structs.replace(options, max_tries=msgspec.UNSET)
                delivery.options = options
                kept = task.options.result if options is None else options.kept_result(task.options.result)
                if kept and self._keeps_results:
                    delivery.result_ttl, delivery.keep_result = kept, True
                    self._records.in_use = True
                if options is not None and options.expires is not None and self._has_expired(delivery, options.expires):
                    return False
                return self._validate(delivery, task, opened)
        raw = self._tasks.raw_handlers.get(message.queue)
        if isinstance(opened, tuple) and (opened[0] in self._tasks.registered_tasks or raw is None):
            delivery.task = opened[0]
            if opened[0] in self._tasks.registered_tasks:
                delivery.handler = self._tasks.registered_tasks[opened[0]]
                delivery.fail(f"invalid envelope: {opened[1]}", "arguments")
                return False
        elif raw is not None:
            delivery.handler = raw
            delivery.task = raw.name
            delivery.args = [message]
            return True
        elif isinstance(opened, Envelope):
            delivery.task = opened.task
        return self._unknown(delivery)

    def _has_expired(self, delivery: Delivery, expires: float) -> bool:
        """Fail a message that is too late to start."""
        enqueued_at = delivery.lease.message.enqueued_at
        # The time of a message that another program wrote may not be known, and its option may be out of range.
        if not enqueued_at or expires <= 0 or self._store_clock.time() < enqueued_at + expires:
            return False
        delivery.fail(f"it expired: it was not started within {expires:g} seconds of its enqueue", "expired")
        return True

    def _validate(self, delivery: Delivery, task: Handler, envelope: Envelope) -> bool:
        try:
            delivery.args, delivery.kwargs = task.signature.convert(envelope.args, envelope.kwargs)
        except InvalidArguments as error:
            delivery.error = error
            if not self._tasks.unknown_for or task.signature.accepts(envelope.args, envelope.kwargs):
                delivery.fail(str(error), "arguments")
            # Otherwise the other version of the app may have enqueued it: `decide_misfit` decides.
            return False
        return True

    async def decide_misfit(self, delivery: Delivery) -> None:
        """Release a call whose arguments do not fit the signature, or fail it if it was refused for long enough."""
        self._warn_of_misfit(delivery)
        is_over = await self._misfits.is_over(delivery)
        if delivery.cancel_reason is not None:
            self._decide_cancelled(delivery, delivery.cancel_reason)
        elif is_over:
            delivery.fail(str(delivery.error), "arguments")
        else:
            self._leave_to_others(delivery, "arguments")

    def _warn_of_misfit(self, delivery: Delivery) -> None:
        key = f"{delivery.task}()"
        if key not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(key)
            fields = {events.ERROR: str(delivery.error), events.HINT: _MISFIT_HINT}
            self._log.warning(events.ARGUMENTS_REFUSED, **delivery.fields(), **fields)

    def _unknown(self, delivery: Delivery) -> bool:
        """Release it: another app, or another version of this one, may know it."""
        queue = delivery.lease.message.queue
        name = delivery.task or f"(no envelope on {queue})"
        if name not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(name)
            fields = {events.TASK: printable(delivery.task), events.QUEUE: queue, events.HINT: _UNKNOWN_HINT}
            self._log.warning(events.UNKNOWN_TASK, **fields)
        self._leave_to_others(delivery, "unknown_task")
        return False

    def _leave_to_others(self, delivery: Delivery, reason: Literal["arguments", "unknown_task"]) -> None:
        message = delivery.lease.message
        # The name of an unknown task comes from outside.
        self._features.add("releases", reason, message.queue, "" if delivery.handler is None else delivery.task)
        delay, pause = self._releases.next(message.queue, message.id, self._clock.monotonic())
        delivery.settle(SettleAction.RELEASE, delay=delay)
        if pause:
            self._events.message_offered(message.queue, pause)

    def _has_tries_left(self, delivery: Delivery) -> bool:
        message = delivery.lease.message
        tries = message.tries
        if tries == 0 or delivery.handler is None:
            return True
        allowed = delivery.max_tries
        if allowed is None:
            if message.deaths < _MOST_DEATHS:
                return True
            reached = f"{message.deaths} attempts in a row killed their process or lost their lease"
        elif tries < allowed:
            return True
        else:
            reached = f"max_tries reached ({tries} of {allowed}). The last worker died or its lease expired"
        delivery.fail(f"{reached}, so this message may be killing its workers. It was not run again.", "poison")
        return False

    # -- the attempt -------------------------------------------------------------------------------------------------

    async def run(self, delivery: Delivery, consumer: asyncio.Task[None]) -> None:
        """Run the handler of a prepared message and decide its outcome.

        Then the delivery has a settlement, or its lease is lost.
        """
        handler = delivery.handler
        now = self._clock.monotonic()
        if delivery.cancel_reason is None and delivery.expires <= now + self._margin:
            # The store granted the lease long before its answer arrived.
            delivery.cancel_reason = CancelReason.LEASE_LOST
        if handler is None or delivery.cancel_reason is not None:
            self._decide(delivery)
            return
        delivery.started = now
        self._active.add(delivery)
        if self._observers:
            self._notify_started(delivery)
        delivery.consumer = consumer
        # The timeout of a process starts when the message has one: see `ProcessRunner`.
        timeout = None if handler.kind == "process" or delivery.isolated else delivery.timeout
        timer = (
            None if timeout is None else consumer.get_loop().call_later(timeout, delivery.cancel, CancelReason.TIMEOUT)
        )
        # The handler's context is a copy of this one. It stays until the next one, or until the consumer rests.
        RUNNING.set(delivery)
        try:
            delivery.error = await self._call(delivery, handler)
        except GeneratorExit:
            # The loop has closed under the consumer.
            raise
        except BaseException as error:  # noqa: BLE001 - it is the message's outcome
            # It cannot be called. Or a cancellation of a call that waits for a thread or process, or a stray one, which
            # the consumer clears.
            delivery.error = error
        finally:
            delivery.consumer = None
            if timer is not None:
                timer.cancel()
            self._active.discard(delivery)
            if delivery.waits and delivery.leftover is None and self._waits is not None:
                self._waits.drop(delivery)
            if delivery.context is not None and delivery.leftover is None:
                # It refers to its delivery: without the way back, no garbage is left for the collector.
                delivery.context, delivery.args = None, []
        delivery.duration = self._clock.monotonic() - delivery.started
        self._decide(delivery)

    def _call(self, delivery: Delivery, handler: Handler) -> Awaitable[BaseException | None]:
        if delivery.isolated:
            return self._runners["isolated"].run(delivery)
        if handler.runner is not None:
            return self._call_around(delivery, handler, handler.runner)
        if handler.takes_context and handler.kind != "process":
            delivery.context = self._context(delivery, handler)
            delivery.args.insert(0, delivery.context)
        if handler.kind == "async":
            return _HandlerCall(handler.function(*delivery.args, **delivery.kwargs), delivery)
        return self._runners[handler.kind].run(delivery)

    def _call_around(
        self, delivery: Delivery, handler: Handler, runner: AttemptRunner
    ) -> Awaitable[BaseException | None]:
        """Run a handler that has hooks or injected parameters."""
        if handler.kind == "process":
            return self._runners["process"].run(delivery)
        context = delivery.context = self._context(delivery, handler)
        if handler.kind == "async":
            return _HandlerCall(runner.run(context, delivery.args, delivery.kwargs, self._providers), delivery)
        return self._runners["thread"].run(delivery)

    def _context(self, delivery: Delivery, handler: Handler) -> Context:
        timeout = delivery.timeout
        return Context(
            lease=delivery.lease,
            task=delivery.task,
            deadline=None if timeout is None else self._clock.time() + timeout,
            headers=delivery.headers,
            state=self._lifespan_value,
            max_tries=delivery.max_tries,
            control=_Control(delivery, self._clock, self._stopping, self._records),
        )

    def _notify_started(self, delivery: Delivery) -> None:
        for observer in self._observers:
            try:
                observer.handler_started(delivery)
            except Exception as problem:  # noqa: BLE001 - an observer must not stop the work
                self._log.error(
                    events.OBSERVER_FAILED,
                    **{events.ERROR_TYPE: type(problem).__name__, events.ERROR: summary_of(problem)},
                )

    # -- after -------------------------------------------------------------------------------------------------------

    def _decide(self, delivery: Delivery) -> None:
        error = delivery.error
        if delivery.isolated and not isinstance(error, NotBegun):
            self._isolation_fails_since.pop(delivery.task, None)
        try:
            if delivery.cancel_reason is not None:
                self._decide_cancelled(delivery, delivery.cancel_reason)
            elif error is None:
                delivery.settle(SettleAction.ACK)
            elif isinstance(error, Fail):
                delivery.fail(outcome_of(error).reason)
            elif isinstance(error, Retry):
                self._retry(delivery, *outcome_of(error))
            elif isinstance(error, NotBegun):
                self._put_back(delivery, error)
            else:
                self._fail(delivery, failure_text(error))
        except BaseException as problem:  # noqa: BLE001 - a bug of a Retry or a policy fails only this message
            self._contain(delivery, problem)

    def _retry(self, delivery: Delivery, reason: str, delay: float | None, counts: bool) -> None:
        """Run the message again, as its handler has asked for."""
        handler = delivery.handler
        assert handler is not None
        policy = handler.options.retries.usual
        if policy is NoRetry:
            policy = DEFAULT_BACKOFF
        if counts:
            self._fail(delivery, reason, policy, delay=delay)
            return
        if delay is None:
            delay = self._delay(policy, delivery.lease.message.tries + 1)
        delivery.released_because = reason
        delivery.settle(SettleAction.RELEASE, delay=delay, survived=True)

    def _delay(self, policy: RetryPolicy, tries: int) -> float:
        # A policy is the code of the app.
        return min(max(0.0, policy.delay(tries, self._draw())), MOST_DELAY)

    def _put_back(self, delivery: Delivery, error: NotBegun) -> None:
        """Release a message whose handler was not called. It counts no try, and a suspect stays one."""
        fields = {events.ERROR_TYPE: error.type_name, events.ERROR: summary_of(error)}
        if delivery.isolated:
            self._isolation_fails_since.setdefault(delivery.task, self._clock.monotonic())
            self._log.warning(events.ISOLATION_FAILED, **delivery.fields(), **fields)
        else:
            self._events.message_offered(delivery.lease.message.queue, _REST)
            self._log.warning(events.HANDLER_NOT_STARTED, **delivery.fields(), **fields)
        delivery.settle(SettleAction.RELEASE, delay=_RELEASE_DELAY)

    def _contain(self, delivery: Delivery, problem: BaseException) -> None:
        """Fail a message because of an error outside of its handler."""
        if delivery.error is not None and problem.__context__ is None:
            problem.__context__ = delivery.error
        delivery.error = problem
        self._fail(delivery, failure_text(problem), DEFAULT_BACKOFF)

    def _decide_cancelled(self, delivery: Delivery, reason: CancelReason) -> None:
        if reason is CancelReason.TIMEOUT and delivery.handler is not None:
            delivery.error = TimeoutError(f"timed out after {delivery.timeout:g} seconds")
            self._fail(delivery, str(delivery.error), code="timeout")
        elif delivery.gone is None:
            # The result of a cancelled handler does not count, because the handler may be incomplete.
            delivery.settle(SettleAction.RELEASE)

    def _fail(
        self,
        delivery: Delivery,
        reason: str,
        policy: RetryPolicy | None = None,
        *,
        delay: float | None = None,
        code: FailureCode = "error",
    ) -> None:
        if delivery.handler is None:
            delivery.fail(reason)
            return
        died = isinstance(delivery.error, ProcessDied)
        message = delivery.lease.message
        tries = message.tries + 1
        allowed = delivery.max_tries
        if tries >= allowed if allowed is not None else died and message.deaths + 1 >= _MOST_DEATHS:
            delivery.fail(reason, "poison" if died else code)
            return
        if policy is None:
            policy = delivery.handler.options.retries.policy_for(delivery.error)
        if policy is NoRetry:
            if not died:
                delivery.fail(reason, code)
                return
            # The handler has raised nothing. It is as if the lease had expired.
            policy = DEFAULT_BACKOFF
        if delay is None:
            delay = self._delay(policy, tries)
        delivery.settle(SettleAction.FAIL_TMP, delay=delay, error=reason, died=died)


class _HandlerCall:
    """Runs a handler's coroutine inside the consumer's task, in a copy of its context, and returns what it raised.

    A task per message would do the same and cost several times as much. Context variables that a handler sets are gone
    when it ends.
    """

    __slots__ = ("_coroutine", "_delivery")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], delivery: Delivery) -> None:
        self._coroutine = coroutine
        self._delivery = delivery

    def __await__(self) -> Generator[Any, Any, BaseException | None]:
        coroutine = self._coroutine
        enter = contextvars.copy_context().run
        step: Callable[[Any], Any] = coroutine.send
        sent: Any = None
        while True:
            try:
                waiting = enter(step, sent)
            except StopIteration as end:
                value, delivery = end.value, self._delivery
                # Most handlers return nothing, and a call would cost more than the rest of this line.
                return None if value is None and not delivery.keep_result else delivery.take_value(value)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
                # The error's traceback has this frame: without the delivery, which will have the error, there is no
                # circle that only the collector ends.
                del self._delivery
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


class _Control:
    """What a delivery tells the context of its handler, as an `AttemptControl`."""

    __slots__ = ("_clock", "_delivery", "_records", "stopping")

    def __init__(self, delivery: Delivery, clock: Clock, stopping: Stopping, records: JobRecords) -> None:
        self._delivery = delivery
        self._clock = clock
        self._records = records
        self.stopping = stopping

    @property
    def reason(self) -> CancelReason | None:
        """Why the handler is stopped."""
        return self._delivery.cancel_reason

    def is_lost(self) -> bool:
        """Return whether the lease is over."""
        return self._delivery.is_lost(self._clock.monotonic())

    def report(self, progress: Progress) -> None:
        """Take the progress of the handler."""
        self._records.report(self._delivery, progress)
