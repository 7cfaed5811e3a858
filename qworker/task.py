"""Tasks: registered functions with their options, and calls of them."""

from __future__ import annotations

import logging
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec

from qworker.attempt.hooks import Hook, hooks_around, publishing_hooks, run_publishing
from qworker.attempt.runner import AttemptRunner
from qworker.call import Call
from qworker.context import Context
from qworker.definition.callables import Kind, handler_name, kind_of
from qworker.definition.hints import OtherMethods, exact_options
from qworker.definition.returns import check_result_type
from qworker.definition.task_options import (
    TaskOptions,
    call_options,
    check_result,
    needs_of,
    sent_options,
    unique_option,
)
from qworker.definition.unique_key import check_by, key_by
from qworker.duration import Moment, Seconds
from qworker.enqueue.buffer import collect, innermost
from qworker.enqueue.portal import check_blocking
from qworker.enqueue.tracing import create_span, is_tracing_configured, send_span
from qworker.envelope import ORIGINAL_ID, CallOptions, EnvelopeEncoder
from qworker.errors import UsageError
from qworker.jobs.job import Job
from qworker.jobs.source import JobApp, JobSource
from qworker.message import Draft, Lease, Message
from qworker.names import to_message_id
from qworker.signature import Signature
from qworker.unique import Unique, check_due
from qworker.validation import check_flag, check_text

__all__ = [
    "RAW_HANDLERS",
    "App",
    "Call",
    "ConfiguredTask",
    "Handler",
    "Job",
    "RawHandler",
    "Task",
    "TaskOptions",
    "configured",
]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")

# Calls log to the logging of the application, because they run in its process.
_log = logging.getLogger("qworker")

# The attribute of a function with its raw handlers by queue, for the processes of handlers that need them.
RAW_HANDLERS = "__qworker_raw_handlers__"

# Bytes. A larger body is stored with a warning.
_LARGE_BODY = 16 << 20


class App(JobApp, Protocol):
    """The methods of the app that a task uses."""

    validate: bool

    def _collect_headers(self, given: Mapping[str, str]) -> dict[str, str]: ...


class Checker(Protocol):
    """The part of a signature that calls use."""

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `InvalidArguments` if the arguments of a call do not fit."""
        ...

    def check_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `InvalidArguments` if the values of a call do not fit."""
        ...

    def values(self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of some parameters in a call."""
        ...


class Callee(Protocol):
    """What a call needs to know of its task, whether this process has its function or not."""

    @property
    def app(self) -> App:
        """The app whose backend takes its calls."""
        ...

    @property
    def name(self) -> str:
        """The name of the task in envelopes."""
        ...

    @property
    def options(self) -> TaskOptions:
        """The options of the task."""
        ...

    @property
    def signature(self) -> Checker:
        """The check of arguments."""
        ...

    @property
    def encoder(self) -> EnvelopeEncoder:
        """The encoder of its envelopes."""
        ...

    @property
    def publishing_hooks(self) -> Sequence[Hook]:
        """The hooks that change its calls."""
        ...

    @property
    def source(self) -> JobSource:
        """What the jobs of its calls know of it."""
        ...


class Handler:
    """A function that runs the messages of one queue, with its options.

    Attributes:
        function: The function as it was registered, with its decorators.
        name: The task's name, or the raw handler's.
        options: How its messages are run.
        kind: Where it runs: `async` (on the event loop), `thread` or `process`.
        signature: The parameters that a call must fill.
        takes_context: Whether the worker gives it a `Context` as its first argument.
        on_failure: The task that is enqueued when a message has failed permanently.
        hooks: The hooks of its app and its own, the outermost first.
        runner: Runs its attempts. None: nothing runs around it, so the worker calls the function.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, options: TaskOptions, hooks: Sequence[Hook] = ()
    ) -> None:
        self.function = function
        self.name = name
        self.options = options
        self.kind: Kind = kind_of(function, process=options.process)
        self.signature = Signature(function, Context, name)
        self.takes_context = self.signature.takes_injected
        self.hooks = tuple(hooks)
        self.runner: AttemptRunner | None = self._create_runner()
        self.on_failure: Task[..., Any] | None = None

    @property
    def queue(self) -> str:
        """The queue whose messages it runs."""
        return self.options.queue

    def _create_runner(self) -> AttemptRunner | None:
        provided = self.signature.provided
        runner = AttemptRunner(
            self.function, self.name, self.kind, self.takes_context, hooks=self.hooks, provided=provided
        )
        return runner if runner.is_needed else None

    def check_joins(self, name: str, hooks: Sequence[Hook]) -> None:
        """Check that it can run in another app, where it has a name and these hooks are around it.

        Raises:
            UsageError: A hook does not fit the function.
        """
        hooks_around(hooks, name, self.kind)

    def join(self, queue: str | None, hooks: Sequence[Hook]) -> None:
        """Let it run in another app.

        Args:
            queue: The queue whose messages it runs there. None: unchanged.
            hooks: The hooks of that app.

        Raises:
            UsageError: A hook does not fit the function.
        """
        if queue is not None:
            self.options = msgspec.structs.replace(self.options, queue=queue)
        if hooks:
            self.hooks = (*hooks, *self.hooks)
            self.runner = self._create_runner()

    def _context(self, message: Message) -> Context:
        """Create the context of a direct call, which has no lease."""
        lease = Lease(message=message, token=0, expires_at=0.0)
        return Context(lease=lease, task=self.name, max_tries=self.options.max_tries)


class RawHandler(Handler):
    """A handler of raw messages. It gets the `Message`, and before it a `Context` if it has a parameter for it."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions, hooks: Sequence[Hook] = ()) -> None:
        super().__init__(function, handler_name(function), options, hooks)
        if not self.signature.fits(1):
            raise UsageError(
                f"handler {self.name!r} must take a Message (and before it, if it wants one, a parameter annotated"
                " Context)"
            )
        self._show_to_processes()

    def _show_to_processes(self) -> None:
        if self.runner is not None and self.kind == "process":
            # A child process finds it by the function's name.
            registered: dict[str, RawHandler] = vars(self.function).setdefault(RAW_HANDLERS, {})
            registered[self.queue] = self

    def join(self, queue: str | None, hooks: Sequence[Hook]) -> None:
        """Let it run in another app. See `Handler.join`."""
        super().join(queue, hooks)
        self._show_to_processes()

    def __call__(self, message: Message) -> Any:
        """Call the function."""
        if self.takes_context:
            return self.function(self._context(message), message)
        return self.function(message)


class Task(Handler, OtherMethods, Generic[P, R_co]):
    """A registered function. Call it directly, or enqueue a call of it.

    Attributes:
        app: The app whose backend takes its calls.
    """

    def __init__(
        self, tasks: App, function: Callable[..., R_co], name: str, options: TaskOptions, hooks: Sequence[Hook] = ()
    ) -> None:
        super().__init__(function, name, options, hooks)
        self.signature.check_json()
        check_by(name, self.signature.parameters, options.unique)
        self.publishing_hooks = publishing_hooks(hooks, self.kind)
        self.app = tasks
        if options.result is not None:
            check_result_type(name, function)
        tasks._check_store(name, options.needs)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self.encoder = EnvelopeEncoder(name)
        self.source = JobSource(tasks, name, function=function, result=options.result)
        self._plain: ConfiguredTask[P, R_co] = ConfiguredTask(self, {})
        self.__doc__ = function.__doc__
        self.__name__ = name
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self._show_signatures()

    def move(self, app: App, name: str, queue: str | None, hooks: Sequence[Hook]) -> None:
        """Let the task belong to another app. What `using` returned before follows.

        Args:
            app: The app.
            name: The task's name there.
            queue: Its queue there. None: unchanged.
            hooks: The hooks of the app.

        Raises:
            UsageError: A hook does not fit the function.
        """
        self.app = app
        self.name = self.__name__ = self.signature.name = name
        self.encoder = EnvelopeEncoder(name)
        self.join(queue, hooks)
        self.publishing_hooks = publishing_hooks(self.hooks, self.kind)
        self.source.app, self.source.task = app, name

    def belongs_to(self, tasks: object) -> bool:
        """Return whether its calls go to this app's backend."""
        return self.app is tasks

    def _show_signatures(self) -> None:
        """Let `inspect.signature` show the parameters of a call for the task and its methods."""
        # Not through `vars(self)`: after an access to an object's `__dict__`, CPython reads its attributes more slowly.
        self.__signature__ = self.signature.shown(returns=self.signature.returns)
        for method, returns in (("call", Call), ("enqueue", Job), ("enqueue_sync", Job)):
            # The plain task uses its own function, without a call in between.
            code: types.FunctionType = vars(ConfiguredTask)[method]
            shown = types.FunctionType(code.__code__, code.__globals__, method, code.__defaults__, code.__closure__)
            shown.__doc__ = vars(Task)[method].__doc__
            shown.__qualname__ = f"Task.{method}"
            vars(shown)["__signature__"] = self.signature.shown("self", returns)
            setattr(self, method, types.MethodType(shown, self._plain))

    def __repr__(self) -> str:
        return f"<task {self.name} on {self.queue}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function directly. Nothing is enqueued, and no hook runs. Give the injected parameters too.

        Raises:
            UsageError: An injected parameter is not given.
        """
        self._require_injected(kwargs)
        if self.takes_context:
            args_given = (self._context(Message(id="direct-call", queue=self.queue, body=b"")), *args)
        else:
            args_given = args
        result: R_co = self.function(*args_given, **kwargs)
        return result

    def _require_injected(self, kwargs: Mapping[str, Any]) -> None:
        missing = next((name for name in self.signature.provided if name not in kwargs), None)
        if missing is not None:
            raise UsageError(
                f"task {self.name!r} is called directly, and only a worker injects {missing!r}: give {missing}=..."
            )

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Return a call for `Tasks.enqueue_many`.

        Raises:
            InvalidArguments: The arguments do not fit the function's parameters.
        """
        return self._plain.call(*args, **kwargs)

    @overload
    async def enqueue(self: Task[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Job[T]: ...

    @overload
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]: ...

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """Enqueue a call. It is stored durably when this returns. In a block of `Tasks.buffered`, when the block ends.

        Raises:
            InvalidArguments: The arguments do not fit the function's parameters.
            BackendError: It was not stored, or it is unknown whether it was (`PublishUncertain`).
        """
        return await self._plain.enqueue(*args, **kwargs)

    @overload
    def enqueue_sync(self: Task[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Job[T]: ...

    @overload
    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]: ...

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """Enqueue a call from code without an event loop. It is stored durably as with `enqueue`.

        Raises:
            UsageError: An event loop is running in this thread: await `enqueue` there.
        """
        return self._plain.enqueue_sync(*args, **kwargs)

    @overload
    def job(self: Task[P, Awaitable[T]], id: str, *, queue: str | None = None) -> Job[T]: ...

    @overload
    def job(self, id: str, *, queue: str | None = None) -> Job[R_co]: ...

    def job(self, id: str, *, queue: str | None = None) -> Job[Any]:  # noqa: A002
        """Return the job of a call that was enqueued before. Nothing is read.

        Args:
            id: The id of the call, as it was given or as `Job.id`.
            queue: Its queue, if that is not the task's own.

        Raises:
            InvalidName: The id is empty.
        """
        # The call can have its own `result=`, which its message knows.
        source = JobSource(self.app, self.name, function=self.function)
        return Job(to_message_id(check_text("id", id)), self.queue if queue is None else queue, None, source)

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
    ) -> ConfiguredTask[P, R_co]:
        """Return the task with options for its calls.

        Args:
            delay: Seconds until the call can run, or a timedelta.
            due_at: When it can run, instead of `delay`: Unix seconds, or a datetime with a time zone.
            priority: 0 (default) to 9 (first).
            unique_key: While a call with this key waits or runs, another one is not stored. Short for
                `unique=Unique(key=...)`.
            id: The message's id: any text of 1 byte or more. While a message with this id is stored, another one is not
                stored. An id that a message cannot have, or with more than 64 bytes, is hashed: `Job.id` is
                `sha256-...`, and the envelope's header `qworker-id` keeps the id.
            queue: A queue to use instead of the task's own.
            headers: Texts by name that are stored with the call.
            hold: Seconds from the enqueue for which the id stays taken although its message is gone, or a timedelta.
            unique: The unique key and its options, instead of the task's own.
            result: Seconds for which the result is kept after the end of the call, or a timedelta. None: it is not
                kept. Without it, the task's own option counts.
            timeout: Seconds that an attempt may take, or a timedelta. None: no limit. Without it, the task's own option
                counts.
            max_tries: The number of failed attempts after which the message is failed. None: no limit. Without it, the
                task's own option counts.
            expires: Seconds from the enqueue, or a timedelta. A message that has not started by then fails with the
                code `expired`, and is not run. A retry is a start too.
            validate: Whether to check the values of the arguments against the annotations.

        Raises:
            InvalidName: `unique_key`, `id` or `queue` is not allowed.
            UsageError: There is a hold and no id, or an option has the wrong type or is out of range.
        """
        fields = call_options(delay, due_at, priority, unique_key, id, queue, headers, hold)
        fields |= unique_option(unique, fields)
        check_by(self.name, self.signature.parameters, unique)
        sent = sent_options(fields, timeout, max_tries, expires)
        if result is not None and result is not msgspec.UNSET:
            result = check_result(result)
            check_result_type(self.name, self.function)
        needs = needs_of(unique, max_tries, result)
        self.app._check_store(self.name, needs)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        check_flag("validate", validate)
        return configured(
            self, fields, given_id=id, queue=queue, headers=headers, result=result, sent=sent, validate=validate
        )


class ConfiguredTask(OtherMethods, Generic[P, R_co]):
    """A task with options for its calls. `Task.using` creates it."""

    __slots__ = (
        "_draft",
        "_given_queue",
        "_headers",
        "_options",
        "_result",
        "_returns",
        "_task",
        "_unique",
        "_validate",
    )

    def __init__(
        self,
        task: Callee,
        draft: Mapping[str, Any],
        *,
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
        result: float | msgspec.UnsetType | None = msgspec.UNSET,
        returns: Any = Any,
        sent: Mapping[str, Any] | None = None,
    ) -> None:
        self._task = task
        self._validate = True
        own = task.source.result
        self._result = own if result is msgspec.UNSET else result
        # A caller that does not know the task reads the option from the message.
        is_plain = self._result is msgspec.UNSET or (self._result is None and own is None)
        kept: dict[str, Any] = {} if is_plain else {"result": self._result}
        self._options = CallOptions(**kept, **(sent or {})) if kept or sent else None
        self._returns = returns
        self._draft = dict(draft)
        if task.options.priority:
            self._draft.setdefault("priority", task.options.priority)
        if task.options.unique is not None and "unique_key" not in self._draft:
            self._draft.setdefault("unique", task.options.unique)
        self._unique: Unique | None = self._draft.pop("unique", None)
        check_due(self._unique, self._draft.get("delay", 0.0), self._draft.get("due_at"))
        if task.options.hold and "id" in self._draft:
            self._draft.setdefault("hold", task.options.hold)
        self._given_queue = queue
        self._headers = dict(headers or {})

    @property
    def _queue(self) -> str:
        # The task's own can change until its app is included in another one.
        return self._task.options.queue if self._given_queue is None else self._given_queue

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Return a call for `Tasks.enqueue_many`. See `Task.call`."""
        if not is_tracing_configured():
            return self._make_call(args, kwargs)
        with create_span(self._queue, self._task.name) as span:
            return self._make_call(args, kwargs, None if span is None else span.get_span_context())

    def _make_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], span_context: Any = None) -> Call:
        task = self._task
        source = task.source
        if self._returns is not Any or self._result != source.result:
            source = source.changed(self._result, self._returns)
        # As `_queue`. Every call comes here, and a property takes time.
        queue = self._given_queue or task.options.queue
        call = Call(queue, self._make_draft(args, kwargs), span_context, source)
        hooks = task.publishing_hooks
        return run_publishing(hooks, call) if hooks else call

    def _make_draft(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        task = self._task
        task.signature.check(args, kwargs)
        if self._validate and task.app.validate:
            task.signature.check_values(args, kwargs)
        headers = task.app._collect_headers(self._headers)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        body = task.encoder.encode(args, kwargs, headers, self._options)
        if len(body) > _LARGE_BODY:
            _log.warning(
                "task %r: a call of %d MiB is enqueued: keep large data elsewhere, and pass its path or id",
                task.name,
                len(body) >> 20,
            )
        if self._unique is not None:
            return self._make_unique(body, self._unique, args, kwargs)
        return Draft(body=body, task=task.name, **self._draft)

    def _make_unique(self, body: bytes, unique: Unique, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        task = self._task
        key = unique.key
        if key is None:
            key = key_by(task.name, unique.by or (), task.signature.values(unique.by or (), args, kwargs))
        options = unique.for_draft()
        return Draft(body=body, task=task.name, unique_key=key, unique=options, **self._draft)

    @overload
    async def enqueue(self: ConfiguredTask[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Job[T]: ...

    @overload
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]: ...

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """Enqueue a call. See `Task.enqueue`."""
        if innermost() is not None:
            call = self.call(*args, **kwargs)
            return collect(self._task.app, call) or await self._publish(call, None)
        if not is_tracing_configured():
            return await self._publish(self._make_call(args, kwargs), None)
        with send_span(self._queue, self._task.name) as span:
            return await self._publish(self._make_call(args, kwargs), span)

    @overload
    def enqueue_sync(self: ConfiguredTask[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Job[T]: ...

    @overload
    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R_co]: ...

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[Any]:
        """Enqueue a call and block. See `Task.enqueue_sync`."""
        _run_sync, instead = self._task.app._run_sync, "`await task.enqueue(...)`"  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if innermost() is not None:
            # Also here, so that the call does not depend on the block.
            check_blocking(instead)
            call = self.call(*args, **kwargs)
            return collect(self._task.app, call) or _run_sync(self._publish(call, None), instead=instead)
        with send_span(self._queue, self._task.name) as span:
            # In this thread, because header sources and hooks may read its context.
            call = self._make_call(args, kwargs)
            return _run_sync(self._publish(call, span), instead=instead)

    async def _publish(self, call: Call, span: Any) -> Job[Any]:
        if call.draft.unique_key is not None:
            call = call.identified()
        backend = await self._task.app.backend()
        (message_id,) = await backend.publish(call.queue, (call.draft,))
        if span is not None:
            size = len(call.draft.body)
            span.set_attributes({"messaging.message.id": message_id, "messaging.message.body.size": size})
        return call.job(message_id)


def configured(  # noqa: PLR0913 - each argument is one option of a call
    task: Callee,
    fields: Mapping[str, Any],
    *,
    given_id: str | None = None,
    queue: str | None = None,
    headers: Mapping[str, str] | None = None,
    result: float | msgspec.UnsetType | None = msgspec.UNSET,
    returns: Any = Any,
    sent: Mapping[str, Any] | None = None,
    validate: bool = True,
) -> ConfiguredTask[Any, Any]:
    """Return a task with checked options for its calls.

    Args:
        task: The task.
        fields: What `call_options` returned.
        given_id: The id as the caller gave it. If the message has another one, a header keeps it.
        queue: A queue to use instead of the task's own.
        headers: Texts by name that are stored with the call.
        result: Seconds for which the result is kept. None: it is not kept. Unset: the task's own option counts.
        returns: The type of the result. Any: the task's own.
        sent: What `sent_options` returned.
        validate: Whether to check the values of the arguments.
    """
    if given_id is not None and fields["id"] != given_id:
        headers = {**(headers or {}), ORIGINAL_ID: given_id}
    made: ConfiguredTask[Any, Any] = ConfiguredTask(
        task, fields, queue=queue, headers=headers, result=result, returns=returns, sent=sent
    )
    made._validate = validate  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return made
