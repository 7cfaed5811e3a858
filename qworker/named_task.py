"""Tasks by name: calls of tasks whose function this process may not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from qworker.attempt.hooks import Hook, publishing_hooks
from qworker.call import Call
from qworker.definition.hints import OtherMethods, exact_options
from qworker.definition.returns import check_result_type, check_returns
from qworker.definition.task_options import (
    TaskOptions,
    call_options,
    check_result,
    needs_of,
    sent_options,
    unique_option,
)
from qworker.definition.unique_key import check_by, without_function
from qworker.duration import Moment, Seconds
from qworker.envelope import EnvelopeEncoder
from qworker.errors import UsageError
from qworker.jobs.job import Job
from qworker.jobs.source import JobSource
from qworker.names import check_existing_queue
from qworker.task import App, ConfiguredTask, Task, configured
from qworker.unique import Unique, check_due
from qworker.validation import check_flag, check_text

__all__ = ["Directory", "NamedTask"]

T = TypeVar("T")


class Directory(App, Protocol):
    """The app of a named task."""

    @property
    def hooks(self) -> Sequence[Hook]:
        """The hooks of the app."""
        ...

    def _find_task(self, name: str) -> Task[..., Any] | None: ...


class _AnyArguments:
    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Accept everything: only the app that has the function knows its parameters."""

    def check_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Accept everything."""

    def values(self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Refuse it: without the function, arguments have no names.

        Raises:
            UsageError: Always.
        """
        raise without_function(names)


class _Absent:
    """A task whose function this process does not have."""

    signature = _AnyArguments()

    def __init__(self, app: Directory, name: str) -> None:
        self.app = app
        self.name = name
        # Hooks that are for some kinds of functions may not be for this one.
        self.publishing_hooks = [
            hook for hook in publishing_hooks(app.hooks, "async") if {"thread", "process"} <= hook.kinds
        ]
        self.options = TaskOptions()
        self.encoder = EnvelopeEncoder(name)
        # Its message, or the worker, knows whether its result is kept.
        self.source = JobSource(app, name)


class NamedTask(OtherMethods, Generic[T]):
    """A task by its name. `Tasks.named` creates it.

    If the app has the task when a call is made, the call has the options of the task and its arguments are checked.
    Otherwise any arguments are accepted, and the worker checks them.
    """

    __slots__ = (
        "_absent",
        "_app",
        "_fields",
        "_given_id",
        "_headers",
        "_kept",
        "_queue",
        "_returns",
        "_sent",
        "_validate",
        "name",
    )

    def __init__(self, app: Directory, name: str, queue: str | None, result: type[T]) -> None:
        if not check_text("name", name):
            raise UsageError("name must not be empty: it is the name of the task in envelopes")
        self.name = name
        self._app = app
        self._queue = None if queue is None else check_existing_queue(check_text("queue", queue))
        check_returns(name, result)
        self._returns = result
        self._absent = _Absent(app, name)
        self._fields: Mapping[str, Any] = {}
        self._given_id: str | None = None
        self._headers: Mapping[str, str] | None = None
        self._kept: float | msgspec.UnsetType | None = msgspec.UNSET
        self._sent: Mapping[str, Any] = {}
        self._validate = True

    def __repr__(self) -> str:
        return f"<task {self.name} by name>"

    @exact_options
    def using(  # noqa: PLR0913 - each argument is one option of a call
        self,
        *,
        delay: Seconds | None = None,
        due_at: Moment | None = None,
        priority: int | None = None,
        unique_key: str | None = None,
        id: str | None = None,  # noqa: A002
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
        hold: Seconds | None = None,
        unique: Unique | None = None,
        result: Seconds | msgspec.UnsetType | None = msgspec.UNSET,
        timeout: Seconds | msgspec.UnsetType | None = msgspec.UNSET,
        max_tries: int | msgspec.UnsetType | None = msgspec.UNSET,
        expires: Seconds | None = None,
        validate: bool = True,
    ) -> NamedTask[T]:
        """Return the task with options for its calls. See `Task.using`.

        Raises:
            InvalidName: `unique_key`, `id` or `queue` is not allowed.
            NotSupported: The backend of the app's URL does not support results, or unlimited tries.
            UsageError: There is a hold and no id, or an option has the wrong type or is out of range.
        """
        made = NamedTask(self._app, self.name, self._queue if queue is None else queue, self._returns)
        fields = call_options(delay, due_at, priority, unique_key, id, queue, headers, hold)
        made._fields = fields | unique_option(unique, fields)
        check_due(unique, fields.get("delay", 0.0), fields.get("due_at"))
        made._given_id, made._headers = id, headers
        made._sent = sent_options(made._fields, timeout, max_tries, expires)
        made._validate = check_flag("validate", validate)
        if result is not None and result is not msgspec.UNSET:
            result = check_result(result)
        needs = needs_of(unique, max_tries, result)
        self._app._check_store(self.name, needs)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        made._kept = result
        return made

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """Return a call for `Tasks.enqueue_many`. See `Task.call`."""
        return self._configured().call(*args, **kwargs)

    async def enqueue(self, *args: Any, **kwargs: Any) -> Job[T]:
        """Enqueue a call. See `Task.enqueue`."""
        return await self._configured().enqueue(*args, **kwargs)

    def enqueue_sync(self, *args: Any, **kwargs: Any) -> Job[T]:
        """Enqueue a call and block. See `Task.enqueue_sync`."""
        return self._configured().enqueue_sync(*args, **kwargs)

    def _configured(self) -> ConfiguredTask[..., Any]:
        known = self._app._find_task(self.name)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if known is not None:
            check_by(self.name, known.signature.parameters, self._fields.get("unique"))
        if known is not None and self._kept is not None and self._kept is not msgspec.UNSET:
            check_result_type(self.name, known.function)
        return configured(
            self._absent if known is None else known,
            self._fields,
            given_id=self._given_id,
            queue=self._queue,
            headers=self._headers,
            result=self._kept,
            returns=self._returns,
            sent=self._sent,
            validate=self._validate,
        )
