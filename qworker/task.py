"""Tasks: registered functions with their options, and calls of them."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from qworker.backend import Backend
from qworker.context import Context
from qworker.definition.callables import handler_name, kind_of
from qworker.definition.hints import OtherMethods, exact_options
from qworker.definition.task_options import TaskOptions, call_options
from qworker.enqueue.tracing import create_span, is_tracing_configured, send_span
from qworker.envelope import ORIGINAL_ID, EnvelopeEncoder
from qworker.errors import UsageError
from qworker.message import Draft, Lease, Message
from qworker.signature import Signature

__all__ = ["App", "Call", "ConfiguredTask", "Handler", "Job", "RawHandler", "Task", "TaskOptions", "configured"]

P = ParamSpec("P")
R = TypeVar("R")

# Calls log to the logging of the application, because they run in its process.
_log = logging.getLogger("qworker")

# Bytes. A larger body is stored with a warning.
_LARGE_BODY = 16 << 20


class App(Protocol):
    """The methods of the app that a task uses."""

    async def backend(self) -> Backend:
        """Return the backend of this event loop."""
        ...

    def _collect_headers(self, given: Mapping[str, str]) -> dict[str, str]: ...

    def _run_sync(self, coroutine: Coroutine[Any, Any, R], *, instead: str) -> R: ...


class Checker(Protocol):
    """The part of a signature that calls use."""

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `InvalidArguments` if the arguments of a call do not fit."""
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


class Job(msgspec.Struct, frozen=True):
    """An enqueued call.

    Attributes:
        id: The message's id. While the message is stored, to enqueue again with this id stores nothing. When the
            message is done, its id is free again, unless the store keeps done messages (the URL option `keep_done`),
            or `hold=` keeps it taken.
            With `using(unique_key=...)` it is the id of the call that already waits or runs, if there is one.
        queue: The message's queue.
    """

    id: str
    queue: str


class Call(msgspec.Struct, frozen=True):
    """A call that is not enqueued yet, for `Tasks.enqueue_many`.

    Attributes:
        queue: The queue of the call.
        draft: The message.
        span_context: The context of the OpenTelemetry span in which it was created. None without a span.
    """

    queue: str
    draft: Draft
    span_context: Any = None


class Handler:
    """A function that runs the messages of one queue, with its options.

    Attributes:
        function: The function as it was registered, with its decorators.
        name: The task's name, or the raw handler's.
        options: How its messages are run.
        kind: Where it runs: `async` (on the event loop), `thread` or `process`.
        signature: The parameters that a call must fill.
        takes_context: Whether the worker gives it a `Context` as its first argument.
    """

    def __init__(self, function: Callable[..., Any], name: str, options: TaskOptions) -> None:
        self.function = function
        self.name = name
        self.options = options
        self.kind = kind_of(function, process=options.process)
        self.signature = Signature(function, Context, name)
        self.takes_context = self.signature.takes_injected

    @property
    def queue(self) -> str:
        """The queue whose messages it runs."""
        return self.options.queue

    def move_to_queue(self, queue: str | None) -> None:
        """Let it run the messages of another queue. None: nothing changes."""
        if queue is not None:
            self.options = msgspec.structs.replace(self.options, queue=queue)

    def _context(self, message: Message) -> Context:
        """Create the context of a direct call, which has no lease."""
        lease = Lease(message=message, token=0, expires_at=0.0)
        return Context(lease=lease, task=self.name, max_tries=self.options.max_tries)


class RawHandler(Handler):
    """A handler of raw messages. It gets the `Message`, and before it a `Context` if it has a parameter for it."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions) -> None:
        super().__init__(function, handler_name(function), options)
        if not self.signature.fits(1):
            raise UsageError(
                f"handler {self.name!r} must take a Message (and before it, if it wants one, a parameter annotated"
                " Context)"
            )

    def __call__(self, message: Message) -> Any:
        """Call the function."""
        if self.takes_context:
            return self.function(self._context(message), message)
        return self.function(message)


class Task(Handler, OtherMethods, Generic[P, R]):
    """A registered function. Call it directly, or enqueue a call of it.

    Attributes:
        app: The app whose backend takes its calls.
    """

    def __init__(self, tasks: App, function: Callable[..., R], name: str, options: TaskOptions) -> None:
        super().__init__(function, name, options)
        self.signature.check_json()
        self.app = tasks
        self.encoder = EnvelopeEncoder(name)
        self._plain: ConfiguredTask[P, R] = ConfiguredTask(self, {})
        self.__doc__ = function.__doc__
        self.__name__ = name
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self._show_signatures()

    def move(self, app: App, name: str, queue: str | None) -> None:
        """Let the task belong to another app. What `using` returned before follows.

        Args:
            app: The app.
            name: The task's name there.
            queue: Its queue there. None: unchanged.
        """
        self.app = app
        self.name = self.__name__ = self.signature.name = name
        self.encoder = EnvelopeEncoder(name)
        self.move_to_queue(queue)

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

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly. Nothing is enqueued."""
        if self.takes_context:
            args_given = (self._context(Message(id="direct-call", queue=self.queue, body=b"")), *args)
        else:
            args_given = args
        result: R = self.function(*args_given, **kwargs)
        return result

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Return a call for `Tasks.enqueue_many`.

        Raises:
            InvalidArguments: The arguments do not fit the function's parameters.
        """
        return self._plain.call(*args, **kwargs)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call. It is stored durably when this returns.

        Raises:
            InvalidArguments: The arguments do not fit the function's parameters.
            BackendError: It was not stored, or it is unknown whether it was (`PublishUncertain`).
        """
        return await self._plain.enqueue(*args, **kwargs)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call from code without an event loop. It is stored durably when this returns.

        Raises:
            UsageError: An event loop is running in this thread: await `enqueue` there.
        """
        return self._plain.enqueue_sync(*args, **kwargs)

    @exact_options
    def using(
        self,
        *,
        delay: float | timedelta | None = None,
        due_at: float | None = None,
        priority: int | None = None,
        unique_key: str | None = None,
        id: str | None = None,  # noqa: A002
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
        hold: float | timedelta | None = None,
    ) -> ConfiguredTask[P, R]:
        """Return the task with options for its calls.

        Args:
            delay: Seconds until the call can run, or a timedelta.
            due_at: Unix seconds at which it can run, instead of `delay`.
            priority: 0 (default) to 9 (first).
            unique_key: While a call with this key waits or runs, another one is not stored.
            id: The message's id: any text of 1 byte or more. While a message with this id is stored, another one is not
                stored. An id that a message cannot have, or with more than 64 bytes, is hashed: `Job.id` is
                `sha256-...`, and the envelope's header `qworker-id` keeps the id.
            queue: A queue to use instead of the task's own.
            headers: Texts by name that are stored with the call.
            hold: Seconds from the enqueue for which the id stays taken although its message is gone, or a timedelta.

        Raises:
            InvalidName: `unique_key`, `id` or `queue` is not allowed.
            UsageError: There is a hold and no id, or an option has the wrong type or is out of range.
        """
        fields = call_options(delay, due_at, priority, unique_key, id, queue, headers, hold)
        return configured(self, fields, given_id=id, queue=queue, headers=headers)


class ConfiguredTask(OtherMethods, Generic[P, R]):
    """A task with options for its calls. `Task.using` creates it."""

    __slots__ = ("_draft", "_given_queue", "_headers", "_task")

    def __init__(
        self,
        task: Callee,
        draft: Mapping[str, Any],
        *,
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._task = task
        self._draft = dict(draft)
        if task.options.priority:
            self._draft.setdefault("priority", task.options.priority)
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
            return Call(self._queue, self._make_draft(args, kwargs))
        with create_span(self._queue, self._task.name) as span:
            draft = self._make_draft(args, kwargs)
            return Call(self._queue, draft, None if span is None else span.get_span_context())

    def _make_draft(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        task = self._task
        task.signature.check(args, kwargs)
        headers = task.app._collect_headers(self._headers)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        body = task.encoder.encode(args, kwargs, headers)
        if len(body) > _LARGE_BODY:
            _log.warning(
                "task %r: a call of %d MiB is enqueued: keep large data elsewhere, and pass its path or id",
                task.name,
                len(body) >> 20,
            )
        return Draft(body=body, task=task.name, **self._draft)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call. See `Task.enqueue`."""
        if not is_tracing_configured():
            return await self._publish(self._make_draft(args, kwargs), None)
        with send_span(self._queue, self._task.name) as span:
            return await self._publish(self._make_draft(args, kwargs), span)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call and block. See `Task.enqueue_sync`."""
        with send_span(self._queue, self._task.name) as span:
            # In this thread, because header sources may read its context.
            draft = self._make_draft(args, kwargs)
            _run_sync = self._task.app._run_sync  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            return _run_sync(self._publish(draft, span), instead="`await task.enqueue(...)`")

    async def _publish(self, draft: Draft, span: Any) -> Job:
        queue = self._queue
        backend = await self._task.app.backend()
        (message_id,) = await backend.publish(queue, (draft,))
        if span is not None:
            span.set_attributes({"messaging.message.id": message_id, "messaging.message.body.size": len(draft.body)})
        return Job(message_id, queue)


def configured(
    task: Callee,
    fields: Mapping[str, Any],
    *,
    given_id: str | None = None,
    queue: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ConfiguredTask[Any, Any]:
    """Return a task with checked options for its calls.

    Args:
        task: The task.
        fields: What `call_options` returned.
        given_id: The id as the caller gave it. If the message has another one, a header keeps it.
        queue: A queue to use instead of the task's own.
        headers: Texts by name that are stored with the call.
    """
    if given_id is not None and fields["id"] != given_id:
        headers = {**(headers or {}), ORIGINAL_ID: given_id}
    return ConfiguredTask(task, fields, queue=queue, headers=headers)
