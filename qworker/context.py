"""The context of a handler: the facts about its own attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import structlog

from qworker.definition.task_options import DEFAULT_MAX_TRIES
from qworker.errors import LeaseLost
from qworker.message import Lease, Message
from qworker.tick import TICK_HEADER, read_tick_header

__all__ = ["Context"]

if TYPE_CHECKING:
    import typing_extensions

    # Only type checkers need the default, with which `Context` alone is `Context[Any]`.
    State_co = typing_extensions.TypeVar("State_co", covariant=True, default=Any)
else:
    State_co = TypeVar("State_co", covariant=True)


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
        max_tries: The task's `max_tries`. This attempt is the last one if `attempt == max_tries`.
        progress_text: The last progress as text. None before the first one.
    """

    __slots__ = (
        "_lease_lost",
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
        max_tries: int = DEFAULT_MAX_TRIES,
        lease_lost: Callable[[], bool] | None = None,
    ) -> None:
        self.message: Message = lease.message
        self.task = task
        self.token = lease.token
        self.deadline = deadline
        self.headers: Mapping[str, str] = headers or {}
        self.state: State_co = state
        self.max_tries = max_tries
        self.progress_text: str | None = None
        self._lease_lost = lease_lost
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

    def check_lease(self) -> None:
        """Check that this delivery still has its lease, such as before a step that must not happen twice.

        The lease can be lost while a handler is suspended or blocked, and the check does not depend on its worker to
        notice that. It does not ask the store, so the lease can be lost right after it. A store that must be sure
        compares `token`.

        Raises:
            LeaseLost: The lease is lost or has expired, or this delivery is over (after the timeout of a thread).
        """
        if self._lease_lost is not None and self._lease_lost():
            raise LeaseLost(
                f"the lease of message {self.message.id} is lost, and another worker may run the message:"
                " stop without further effects"
            )

    def progress(self, done: float, total: float | None = None, text: str = "") -> None:
        """Report the progress of the handler. It is shown with the worker's running messages, and logged."""
        self.progress_text = f"{done:g}/{total:g} {text}".strip() if total else f"{done:g} {text}".strip()
        self.log.debug("progress", done=done, total=total, text=text)
