"""Explain why one message is not running yet, or what happened to it.

It uses the backend, and the app if it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.backend.offers import COUNTED, QueueGlance, glance_at, has_unique_key, held_until
from qworker.cell import Cell, CellOp
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.definition.task_options import TaskOptions
from qworker.envelope import CallOptions, Envelope, open_envelope
from qworker.errors import BackendError, InvalidArguments
from qworker.failed_call import reported_by
from qworker.failure_text import CANCELLED, code_of, without_code
from qworker.history.event import Event
from qworker.jobs.look import find_message
from qworker.jobs.records import PROGRESS, RESULTS, WAITS, get_cell, read_progress, read_wait
from qworker.logs import one_line
from qworker.message import MessageRef, Query, State, StoredMessage
from qworker.names import counted, id_forms, printable
from qworker.parcel import unpack
from qworker.refusal import MISFITS, refused_since
from qworker.signature import Signature
from qworker.tick import TICK_HEADER, TickOf, read_tick_header, tick_of_id

__all__ = ["Code", "Explanation", "Reason", "explain"]

# If a message has been ready for longer than this while no message is leased, probably no worker reads the queue.
_ABANDONED_S = 5.0

_UNCOUNTED = f". More than {COUNTED:,} messages wait in this queue, so those ahead of it are not counted."

Code = Literal[
    "not-found",
    "ready",
    "paused",
    "delayed",
    "retrying",
    "retry-policy",
    "expires",
    "leased",
    "expired",
    "failed",
    "cancelled",
    "done",
    "unknown-task",
    "bad-arguments",
    "invalid-envelope",
    "no-handler",
    "no-history",
    "no-worker",
    "wrong-queue",
    "suspect",
    "result",
    "held",
    "report",
    "tick",
    "unique",
    "waits",
]


class Reason(msgspec.Struct, frozen=True):
    """One fact about the message.

    Attributes:
        code: A constant, for programs.
        text: One sentence, for people.
    """

    code: Code
    text: str


class Explanation(msgspec.Struct, frozen=True):
    """All that is known about a message, the most important first.

    Attributes:
        id: The id of the message.
        queue: Its queue.
        state: Its state. None: it is not stored.
        reasons: The facts about it.
        stored: The stored message, if there is one.
        history: The events that workers have recorded, the oldest first. Empty if no history is kept.
        error: Its last failure, complete, as far as it is kept. None if it has not failed.
    """

    id: str
    queue: str
    state: State | None
    reasons: list[Reason]
    stored: StoredMessage | None = None
    history: list[Event] = []
    error: str | None = None


async def explain(
    backend: Backend,
    queue: str,
    message_id: str,
    tasks: Tasks | None = None,
    clock: Clock = SYSTEM_CLOCK,
    *,
    perhaps: Sequence[str] = (),
) -> Explanation:
    """Explain one message.

    Args:
        backend: The store.
        queue: The queue of the message.
        message_id: The id of the message, or the id that its publisher gave.
        tasks: The app that should run it. None: nothing is said about tasks.
        clock: The clock.
        perhaps: The names of tasks that it may be, so that a deep queue need not be listed.

    Raises:
        QueueNotFound: The queue does not exist.
        InvalidName: The id is empty, or is not valid Unicode.
    """
    forms = id_forms(message_id)
    refs = [MessageRef(form, perhaps=tuple(perhaps)) for form in forms]
    stored = next(iter(await backend.find(queue, refs)), None)
    message_id = forms[0] if stored is None else stored.message.id
    history, unreadable = await _history(backend, queue, message_id)
    held = [*await _hold(backend, queue, message_id, stored), *await _result(backend, queue, message_id)]
    if stored is not None and await has_unique_key(backend, stored.message):
        held += _key(stored)
    if stored is None:
        reason = _gone(history[-1]) if history else _not_found(queue, await glance_at(backend, queue))
        told = _tick(tick_of_id(message_id))
        return Explanation(
            message_id, queue, None, [reason, *told, *held, *unreadable], None, history, _told_error(history)
        )
    error = stored.error
    if stored.state is not State.FAILED and stored.message.tries and "retry_errors" in backend.deviations:
        error = _told_error(history) or error
    reasons = [*await _by_state(backend, stored, error, clock.time()), *_report(stored), *unreadable]
    if stored.state is State.LEASED:
        reasons += await _wait(backend, queue, message_id, clock.time())
    if stored.state in {State.READY, State.DELAYED, State.LEASED}:
        reasons += _expiry(stored)
        if stored.message.deaths:
            reasons.append(Reason("suspect", _suspicion(stored.message.deaths)))
        if tasks is not None:
            reasons += await _by_app(backend, stored, tasks)
    reasons += _tick(_tick_of(stored))
    reasons += held
    return Explanation(message_id, queue, stored.state, reasons, stored, history, error)


def _tick_of(stored: StoredMessage) -> TickOf | None:
    opened = open_envelope(unpack(stored.message).body)
    header = opened.headers.get(TICK_HEADER) if isinstance(opened, Envelope) else None
    return None if header is None else read_tick_header(header)


def _tick(tick: TickOf | None) -> list[Reason]:
    """Explain which tick of a schedule the message is, if it is one."""
    if tick is None:
        return []
    seconds = f":{tick.moment:%S}" if tick.moment.second else ""
    text = f"it is the tick {tick.moment:%Y-%m-%d %H:%M}{seconds} ({tick.tz}) of schedule {tick.schedule}"
    return [Reason("tick", text)]


def _told_error(history: list[Event]) -> str | None:
    """Return the last failure that workers have recorded."""
    return next((event.text or event.error for event in reversed(history) if event.error), None)


async def _history(backend: Backend, queue: str, message_id: str) -> tuple[list[Event], list[Reason]]:
    """Return the events of a message.

    If the history is damaged, return the reason: the message itself may be intact.
    """
    try:
        return await backend.history.for_message(queue, message_id), []
    except BackendError as error:
        return [], [Reason("no-history", f"its history cannot be read: {error}")]


def _gone(last: Event) -> Reason:
    """Explain a message that is not stored any more, from its last event."""
    ran = f" after {last.duration_s:.3g} s" if last.duration_s is not None else ""
    if last.kind == "acked":
        return Reason("done", f"it finished{_at(last.at)}{ran} on {last.worker}, and is not kept")
    if last.kind == "cancelled":
        return Reason("cancelled", f"it was cancelled{_at(last.at)} while {last.worker} ran it; it is not kept")
    if last.kind == "failed":
        return Reason(
            "failed", f"it failed permanently{_at(last.at)}: {last.error or 'no reason was kept'}; it is not kept"
        )
    return Reason(
        "not-found", f"it is not stored any more; its last known event: {last.kind}{_at(last.at)} by {last.worker}"
    )


async def _hold(backend: Backend, queue: str, message_id: str, stored: StoredMessage | None) -> list[Reason]:
    """Explain the hold of an id, if there is one."""
    end = await held_until(backend, queue, message_id)
    if end is None:
        return []
    also = "" if stored is None else ", also when the message is gone"
    return [Reason("held", f"its id is held until{_time(end)}: another message with it is not stored before{also}")]


def _key(stored: StoredMessage) -> list[Reason]:
    """Explain the unique key of a message, if it waits or is leased."""
    message, unique = stored.message, stored.message.unique
    if stored.state not in {State.READY, State.DELAYED, State.LEASED}:
        return []
    key = printable(message.unique_key or "")
    if unique is not None and unique.until == "started":
        # A retry has started too, and a release of a started message shows nothing.
        if stored.state is State.LEASED or message.tries:
            return []
        return [Reason("unique", f"it holds unique key {key} until it starts")]
    where = " in all queues" if unique is not None and unique.scope == "app" else ""
    return [Reason("unique", f"it holds unique key {key} until done{where}")]


def _report(stored: StoredMessage) -> list[Reason]:
    """Explain a call of an `on_failure` task."""
    opened = open_envelope(unpack(stored.message).body)
    found = reported_by(opened.headers) if isinstance(opened, Envelope) else None
    return [] if found is None else [Reason("report", f"it reports the failure of {found[1]} ({found[0]})")]


async def _result(backend: Backend, queue: str, message_id: str) -> list[Reason]:
    """Explain the result that is kept for callers, if there is one."""
    if "cells" in backend.deviations:
        return []
    (reply,) = await backend.cells(queue, [get_cell(RESULTS, message_id)])
    if reply.cell is None or reply.cell.ttl is None:
        return []
    until = datetime.now(UTC).timestamp() + reply.cell.ttl
    return [Reason("result", f"its result is kept until{_time(until)}")]


async def _wait(backend: Backend, queue: str, message_id: str, now: float) -> list[Reason]:
    """Explain which job the handler waits for, if it waits."""
    if "cells" in backend.deviations:
        return []
    (reply,) = await backend.cells(queue, [get_cell(WAITS, message_id)])
    job = read_wait(reply.cell)
    if job is None:
        return []
    found = await find_message(backend, job.queue, job.id, None)
    state = "" if found is None else f" ({found.state.word})"
    if found is not None and found.state is State.LEASED:
        since = await _started_at(backend, job.queue, job.id)
        state = " (running)" if since is None else f" (running for {max(0.0, now - since):.0f} s)"
    return [Reason("waits", f"it waits for job {job.id} in queue {job.queue}{state}")]


async def _started_at(backend: Backend, queue: str, message_id: str) -> float | None:
    """Return when the handler of a leased message started, as far as it is recorded."""
    (reply,) = await backend.cells(queue, [get_cell(PROGRESS, message_id)])
    progress = read_progress(reply.cell)
    if progress is not None and progress.started_at is not None:
        return progress.started_at
    events, _ = await _history(backend, queue, message_id)
    return next((event.at for event in reversed(events) if event.kind == "leased"), None)


def _not_found(queue: str, glance: QueueGlance) -> Reason:
    kept = glance.retention.get("done")
    done = f"finished messages here: {kept}" if kept else "finished messages may not be kept here"
    return Reason(
        "not-found",
        f"{queue} has no message with this id: it has finished ({done}), was removed, or never existed",
    )


async def _by_state(backend: Backend, stored: StoredMessage, error: str | None, now: float) -> list[Reason]:
    match stored.state:
        case State.READY | State.DELAYED:
            queue = stored.message.queue
            glance = await glance_at(backend, queue)
            is_ready = stored.state is State.READY
            reasons = await _ready(backend, stored, glance, now) if is_ready else [_delayed(stored, error, now)]
            if glance.is_paused:
                text = f"{queue} is paused: nothing is leased from it until `qworker resume`"
                reasons.insert(0, Reason("paused", text))
            return reasons
        case State.LEASED:
            return [_leased(stored, now)]
        case State.FAILED:
            return [_failed(stored)]
        case State.DONE:
            return [Reason("done", f"it finished{_at(stored.finished_at)}")]


async def _ready(backend: Backend, stored: StoredMessage, glance: QueueGlance, now: float) -> list[Reason]:
    where = _ahead(*await _position(backend, stored)) if glance.is_short else _UNCOUNTED
    reasons = [Reason("ready", f"it is ready{where}")]
    if not glance.is_paused and not glance.has_leases and now - stored.message.enqueued_at > _ABANDONED_S:
        reasons.append(
            Reason(
                "no-worker",
                "nothing in this queue is leased, so probably no worker is running: start `qworker run`",
            )
        )
    return reasons


def _ahead(count: int | None, urgent: int) -> str:
    if count is None:
        return f". There are more than {COUNTED:,} messages ahead of it."
    if count == 0:
        return ", and the next to be leased"
    higher = f": {urgent} with a higher priority" if urgent else ""
    return f". There {'is' if count == 1 else 'are'} {counted(count, 'message')} ahead of it{higher}."


async def _position(backend: Backend, stored: StoredMessage) -> tuple[int | None, int]:
    """Return how many ready messages are taken before this one, and how many of them have a higher priority.

    Without the first number, they are too many to count.
    """
    position = urgent = 0
    async for page in backend.browse(stored.message.queue, Query(State.READY, limit=COUNTED + 1)):
        for other in page:
            if other.message.id == stored.message.id:
                return position, urgent
            position += 1
            urgent += other.message.priority > stored.message.priority
    # The message was taken in the meantime, or is beyond the limit.
    return None if position > COUNTED else position, urgent


def _delayed(stored: StoredMessage, error: str | None, now: float) -> Reason:
    due = stored.due_at or now
    when = f"in {due - now:.1f} s{_at(stored.due_at)}" if due > now else "now: the next worker that leases gets it"
    if stored.message.tries:
        why = f"; last error: {one_line(error)}" if error else ""
        return Reason("retrying", f"it has failed {_times(stored.message.tries)} and is due {when}{why}")
    return Reason("delayed", f"it is delayed, due {when}")


def _leased(stored: StoredMessage, now: float) -> Reason:
    holder = stored.holder or "a worker"
    expires = stored.expires_at
    if expires is not None and expires <= now:
        return Reason(
            "expired", f"{holder} leased it, but the lease has expired{_at(expires)}: the next reap makes it ready"
        )
    left = f" for {expires - now:.1f} s more{_at(expires)}, unless extended" if expires is not None else ""
    return Reason("leased", f"{holder} is working on it{left}")


def _failed(stored: StoredMessage) -> Reason:
    if code_of(stored.error) == CANCELLED:
        who = one_line(without_code(stored.error or "")).removeprefix("cancelled")
        return Reason(
            "cancelled",
            f"it was cancelled{_at(stored.finished_at)}{who}; `qworker requeue` with its id runs it after all",
        )
    why = one_line(stored.error or "") or "no reason was kept"
    tries = f", after {counted(stored.message.tries, 'earlier attempt')}" if stored.message.tries else ""
    again = "`qworker requeue` tries again"
    if code_of(stored.error) == "poison":
        again = "it may kill workers, so `qworker requeue` needs its id or --code poison"
    return Reason("failed", f"it failed permanently{_at(stored.finished_at)}{tries}: {why.rstrip('.')}; {again}")


def _suspicion(deaths: int) -> str:
    what = "its last attempt" if deaths == 1 else f"its last {deaths} attempts"
    return f"{what} killed the process or lost the lease, so workers run it in a child process"


async def _by_app(backend: Backend, stored: StoredMessage, tasks: Tasks) -> list[Reason]:
    queue = stored.message.queue
    found: list[Reason] = []
    if queue not in tasks.queue_names():
        found.append(
            Reason(
                "wrong-queue", f"the app has no task or raw handler for {queue}: run it with `-Q {queue}` to work there"
            )
        )
    opened = open_envelope(unpack(stored.message).body)
    if isinstance(opened, Envelope) and opened.task in tasks.registered_tasks:
        found += _policy(stored, tasks[opened.task].options, opened.options)
        signature = tasks[opened.task].signature
        try:
            signature.convert(opened.args, opened.kwargs)
        except InvalidArguments as error:
            if tasks.unknown_for and not signature.accepts(opened.args, opened.kwargs):
                found.append(await _misfit(backend, stored, tasks.unknown_for, signature, error))
            else:
                found.append(Reason("bad-arguments", f"it will fail permanently: {error}"))
    elif queue in tasks.raw_handlers and not (isinstance(opened, tuple) and opened[0] in tasks.registered_tasks):
        return found
    elif isinstance(opened, Envelope):
        known = ", ".join(sorted(tasks.registered_tasks)) or "none"
        text = f"no worker of this app knows task {opened.task}: it is released and stays in the queue"
        found.append(Reason("unknown-task", f"{text}; the app has {known}"))
    elif opened is not None:
        found.append(
            Reason("invalid-envelope", f"it names the task {opened[0]!r}, but its envelope is not valid: {opened[1]}")
        )
    else:
        found.append(
            Reason("no-handler", f"its body is not a call of a task, and the app has no raw handler for {queue}")
        )
    return found


def _expiry(stored: StoredMessage) -> list[Reason]:
    """Explain when a message is too late to start."""
    opened = open_envelope(unpack(stored.message).body)
    options = opened.options if isinstance(opened, Envelope) else None
    if options is None or options.expires is None or options.expires <= 0 or not stored.message.enqueued_at:
        # As for the worker: an option that is out of range, or that counts from a time that is not known.
        return []
    return [Reason("expires", f"it expires{_at(stored.message.enqueued_at + options.expires)}")]


def _policy(stored: StoredMessage, options: TaskOptions, of_call: CallOptions | None) -> list[Reason]:
    """Explain when a message that has failed runs again."""
    tries = stored.message.tries
    if not tries:
        return []
    most = options.max_tries if of_call is None else of_call.allowed_tries(options.max_tries)
    allowed = "" if most is None else f" of {most}"
    return [Reason("retry-policy", f"its retry policy is {options.retries}, tries {tries}{allowed}")]


async def _misfit(
    backend: Backend, stored: StoredMessage, patience: float, signature: Signature, error: InvalidArguments
) -> Reason:
    """Explain a call whose arguments do not fit the signature."""
    message = stored.message
    since = None
    if "cells" not in backend.deviations:
        (reply,) = await backend.cells(message.queue, [CellOp("get", Cell(MISFITS, message.id))])
        since = refused_since(reply.cell)
    until = f"for {patience:g} s after its first refusal" if since is None else f"until{_time(since + patience)}"
    return Reason(
        "bad-arguments",
        f"its arguments do not fit {signature.name}({', '.join(signature.parameters)}): {error.__cause__ or error};"
        f" it is retried {until}, because a deploy may be running",
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _at(seconds: float | None) -> str:
    return "" if seconds is None else f" at{_time(seconds)}"


def _time(seconds: float) -> str:
    return f" {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%SZ}"
