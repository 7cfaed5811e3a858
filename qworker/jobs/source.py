"""Where a job comes from: its app, its task, and the type of its result."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from qworker.backend import Backend
from qworker.definition.returns import result_type
from qworker.definition.task_options import NeedyOption
from qworker.envelope import Envelope, open_envelope
from qworker.errors import (
    InvalidArguments,
    JobCancelled,
    JobFailed,
    ResultNotEncodable,
    ResultTooBig,
    UsageError,
)
from qworker.failure_text import summary
from qworker.jobs.records import StoredResult
from qworker.message import Draft, Message
from qworker.parcel import unpack
from qworker.values import decode_json

__all__ = ["JobApp", "JobSource", "Opened", "Report"]

R = TypeVar("R")


# The queue and the message of the call that reports a failure.
Report: TypeAlias = tuple[str, Draft]


class JobApp(Protocol):
    """The parts of an app that its jobs use."""

    @property
    def registered_tasks(self) -> Mapping[str, Any]:
        """The tasks by name."""
        ...

    async def backend(self) -> Backend:
        """Return the backend of this event loop."""
        ...

    def _check_store(self, task: str, needs: Sequence[NeedyOption]) -> None: ...

    def _check_later(self, draft: Draft) -> None: ...

    def _failure_report(self, task: str, message: Message, code: Literal["cancelled"], error: str) -> Report | None: ...

    def _run_sync(self, coroutine: Coroutine[Any, Any, R], *, instead: str) -> R: ...


class Opened(msgspec.Struct, frozen=True):
    """The call in a message, as far as this app can read it.

    Attributes:
        task: The task's name. None: the message is not an envelope.
        args: The positional arguments: as the handler gets them, or as JSON if this app does not know the task.
        kwargs: The arguments by name.
        max_tries: The call's or the task's `max_tries`, if it is known.
        result: Seconds for which the result is kept. None: it is not kept. Unset: this app does not know it.
    """

    task: str | None = None
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = {}
    max_tries: int | None = None
    result: float | msgspec.UnsetType | None = msgspec.UNSET


class JobSource:
    """What the jobs of one task have in common.

    Args:
        app: The app.
        task: The task's name. None: it is not known.
        function: The handler, whose annotation is the type of the result. None: `returns` is the type.
        returns: The type of the result.
        result: Seconds for which results are kept. None: they are not. Unset: it is not known.
    """

    __slots__ = ("_function", "_returns", "app", "result", "task")

    def __init__(
        self,
        app: JobApp,
        task: str | None,
        *,
        function: Any = None,
        returns: Any = Any,
        result: float | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> None:
        self.app = app
        self.task = task
        self.result = result
        self._function = function
        self._returns = returns

    @property
    def returns(self) -> Any:
        """The type of the result."""
        if self._function is not None:
            self._returns, self._function = result_type(self._function), None
        return self._returns

    def changed(self, result: float | msgspec.UnsetType | None, returns: Any) -> JobSource:
        """Return what the jobs of calls with other options know.

        Args:
            result: Seconds for which their results are kept. None: they are not. Unset: it is not known.
            returns: The type of their results. Any: the same as here.
        """
        other = JobSource(self.app, self.task, function=self._function, returns=self._returns, result=result)
        if returns is not Any:
            other._returns, other._function = returns, None
        return other

    def check_kept(self, opened: Opened | None = None) -> None:
        """Check that results are kept.

        Args:
            opened: The call, once it was read.

        Raises:
            UsageError: They are not.
        """
        kept = self.result if opened is None or opened.result is msgspec.UNSET else opened.result
        if kept is None:
            raise no_result(self.task if opened is None else opened.task)

    def value_of(self, message_id: str, record: StoredResult) -> Any:
        """Return the value of a job.

        Raises:
            JobError: The job has none.
            UsageError: The value does not have the type of the result.
        """
        if record.state == "done" and record.value is not msgspec.UNSET:
            try:
                return decode_json(record.value, self.returns)
            except msgspec.ValidationError as error:
                raise UsageError(
                    f"the result of job {message_id} does not fit its type: {error}: check the annotation of the task"
                ) from error
        if record.state == "cancelled":
            raise JobCancelled(f"job {message_id} was cancelled")
        if record.state == "failed":
            raise JobFailed(record.error_type, record.text, record.code, summary(record.text))
        if record.state == "too_big":
            raise ResultTooBig(f"job {message_id} is done, but its result is larger than 64 KiB: store it elsewhere")
        raise ResultNotEncodable(f"job {message_id} is done, but its result is not JSON: {record.text}")

    def open(self, message: Message) -> Opened:
        """Read the call in a message."""
        envelope = open_envelope(unpack(message).body)
        if not isinstance(envelope, Envelope):
            return Opened(envelope[0] if isinstance(envelope, tuple) else None)
        task = self.app.registered_tasks.get(envelope.task)
        args, kwargs = envelope.args, envelope.kwargs
        if task is not None:
            try:
                args, kwargs = task.signature.convert(args, kwargs)
            except InvalidArguments:
                # The worker fails such a message. A look at it shows what was sent.
                pass
        own = msgspec.UNSET if task is None else task.options.result
        kept = own if envelope.options is None else envelope.options.kept_result(own)
        tries = None if task is None else task.options.max_tries
        if envelope.options is not None:
            tries = envelope.options.allowed_tries(tries)
        return Opened(envelope.task, tuple(args), kwargs, tries, kept)


def no_result(task: str | None) -> UsageError:
    """Return the error of a job whose task keeps no results."""
    name = "the task" if task is None else f"task {task!r}"
    return UsageError(f"{name} keeps no result: add result=3600 to the task or to using()")
