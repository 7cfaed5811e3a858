"""The context of a handler: the facts about its own attempt, and how it learns that it must stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import structlog

from qworker.definition.task_options import DEFAULT_MAX_TRIES
from qworker.errors import LeaseLost
from qworker.jobs.records import Progress, check_progress
from qworker.message import Lease, Message
from qworker.tick import TICK_HEADER, read_tick_header

__all__ = ["AttemptControl", "CancelReason", "Context", "Stopping"]

if TYPE_CHECKING:
    import typing_extensions

    # Only type checkers need the default, with which `Context` alone is `Context[Any]`.
    State_co = typing_extensions.TypeVar("State_co", covariant=True, default=Any)
else:
    State_co = TypeVar("State_co", covariant=True)


class CancelReason(StrEnum):
    """Why a handler is stopped. Its outcome does not count."""

    # Its timeout is over.
    TIMEOUT = "timeout"
    # The worker stops, and the grace period is over.
    SHUTDOWN = "shutdown"
    # The message was cancelled.
    CANCELLED = "cancelled"
    # The lease is lost, or could not be extended and is about to expire: another worker may run the message.
    LEASE_LOST = "lease_lost"


class Stopping:
    """The notice that the worker stops. It is set at SIGTERM, when the grace period begins, and never reset."""

    __slots__ = ("_event", "_lock", "_waiting")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Return whether the worker stops. From any thread."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until the worker stops. On any event loop."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._event.is_set():
                return
            self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def wait_sync(self, timeout: float | None = None) -> bool:
        """Block until the worker stops, for up to `timeout` seconds, and return whether it does.

        Not on an event loop.
        """
        return self._event.wait(timeout)

    def set(self) -> None:
        """Give the notice. From any thread. Idempotent."""
        with self._lock:
            self._event.set()
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            try:
                future.get_loop().call_soon_threadsafe(_finish, future)
            except RuntimeError:
                # The loop has closed.
                continue


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AttemptControl(Protocol):
    """What a context asks the runner of its attempt. From any thread."""

    @property
    def reason(self) -> CancelReason | None:
        """Why the handler is stopped."""
        ...

    @property
    def stopping(self) -> Stopping:
        """The notice that the worker stops."""
        ...

    def is_lost(self) -> bool:
        """Return whether the lease is over."""
        ...

    def report(self, progress: Progress) -> None:
        """Take the progress of the handler."""
        ...


# For direct calls of tasks.
_NEVER = Stopping()


class Context(Generic[State_co]):
    """The facts that a handler can know about its own attempt.

    A handler whose first parameter is annotated with `Context` gets one. `Context[Pool]` also gives the type that its
    app's lifespan yields. A direct call of a task creates its own context.

    Attributes:
        message: The message that the handler runs for.
        task: The task's name, or the raw handler's.
        token: The lease's fencing token, which rises with each delivery. Give it to stores that refuse a lower one.
        deadline: Unix seconds at which `timeout` cancels the handler. None without a timeout.
        headers: The headers of the call: texts by name.
        state: The value that the app's lifespan yielded. None without a lifespan.
        max_tries: The call's or the task's `max_tries`. This attempt is the last one if `attempt == max_tries`. None:
            there is no limit.
        progress_text: The last progress as text. None before the first one.
    """

    __slots__ = (
        "_control",
        "_log",
        "deadline",
        "headers",
        "max_tries",
        "message",
        "progress_text",
        "state",
        "task",
        "token",
    )

    def __init__(
        self,
        *,
        lease: Lease,
        task: str,
        deadline: float | None = None,
        headers: Mapping[str, str] | None = None,
        state: Any = None,
        max_tries: int | None = DEFAULT_MAX_TRIES,
        control: AttemptControl | None = None,
    ) -> None:
        self.message: Message = lease.message
        self.task = task
        self.token = lease.token
        self.deadline = deadline
        self.headers: Mapping[str, str] = headers or {}
        self.state: State_co = state
        self.max_tries = max_tries
        self.progress_text: str | None = None
        self._control = control
        self._log: Any = None

    @property
    def tries(self) -> int:
        """Failed attempts before this one."""
        return self.message.tries

    @property
    def attempt(self) -> int:
        """The number of this attempt. The first one is 1."""
        return self.message.tries + 1

    @property
    def tick(self) -> datetime | None:
        """The moment of its schedule, in the time zone of the schedule. None: the call is not of a schedule."""
        text = self.headers.get(TICK_HEADER)
        tick = None if text is None else read_tick_header(text)
        return None if tick is None else tick.moment

    @property
    def log(self) -> Any:
        """A structlog logger bound to the message's id, task, queue, tries and token."""
        if self._log is None:
            self._log = structlog.get_logger("qworker.handler").bind(
                message_id=self.message.id,
                task=self.task,
                queue=self.message.queue,
                tries=self.message.tries,
                token=self.token,
            )
        return self._log

    @property
    def reason(self) -> CancelReason | None:
        """Why the handler is stopped; None while it is not.

        An async handler reads it when it gets `CancelledError`. A handler in a process is killed instead.
        """
        return None if self._control is None else self._control.reason

    def cancelled(self) -> bool:
        """Return whether the handler is to stop, for a handler in a thread, which cannot be interrupted.

        From then on its outcome does not count.
        """
        return self.reason is not None

    @property
    def stopping(self) -> Stopping:
        """The notice that the worker stops, so that a long handler can save its state within the grace period."""
        return _NEVER if self._control is None else self._control.stopping

    def check_lease(self) -> None:
        """Check that this delivery still has its lease, such as before a step that must not happen twice.

        The lease can be lost while a handler is suspended or blocked, and the check does not depend on its worker to
        notice that. It does not ask the store, so the lease can be lost right after it. A store that must be sure
        compares `token`.

        Raises:
            LeaseLost: The lease is lost or has expired, or this delivery is over (after the timeout of a thread).
        """
        if self._control is not None and self._control.is_lost():
            raise LeaseLost(
                f"the lease of message {self.message.id} is lost, and another worker may run the message:"
                " stop without further effects"
            )

    def progress(
        self, done: float, total: float | None = None, text: str = "", data: Mapping[str, object] | None = None
    ) -> None:
        """Report the progress of the handler. It is shown with the worker's running messages, and logged.

        It is stored for `Job.progress` and `Job.status`, at most twice a second. The last one is always stored.

        Args:
            done: How much is done.
            total: How much there is in all. None: it is not known.
            text: A text for people.
            data: Values by name that JSON can hold, at most 32 KiB.

        Raises:
            UsageError: JSON cannot hold it, or it is too large.
        """
        progress = check_progress(Progress(done, total, text, {} if data is None else data))
        self.progress_text = f"{done:g}/{total:g} {text}".strip() if total else f"{done:g} {text}".strip()
        self.log.debug("progress", done=done, total=total, text=text)
        if self._control is not None:
            self._control.report(progress)
