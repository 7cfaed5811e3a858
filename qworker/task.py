"""Tasks: registered functions and their options, and the calls made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import msgspec

from qworker.context import Context
from qworker.envelope import EnvelopeEncoder
from qworker.errors import UsageError
from qworker.message import Draft, Message
from qworker.names import check_id, check_key, check_queue
from qworker.retry import DEFAULT_BACKOFF, Backoff
from qworker.signature import Signature
from qworker.tracing import creating, imported, sending

if TYPE_CHECKING:
    from qworker.app import Tasks

__all__ = ["BoundTask", "Call", "Handler", "Job", "Options", "RawHandler", "Task"]

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal["async", "thread", "process"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a handler's messages are run."""

    queue: str = "default"
    # After this many failed attempts a message goes to `fail`.
    max_tries: int = 5
    # Seconds a run may take; then it is cancelled and counts as failed. None: as long as it takes.
    timeout: float | None = None
    backoff: Backoff = DEFAULT_BACKOFF
    # Run in a process pool, for work that holds the GIL.
    process: bool = False
    # The priority of calls that name none.
    priority: int = 0

    def __post_init__(self) -> None:
        check_queue(self.queue)
        if self.max_tries < 1:
            raise UsageError(f"max_tries is at least 1, not {self.max_tries}")
        if self.timeout is not None and self.timeout <= 0:
            raise UsageError(f"timeout is more than 0 seconds, not {self.timeout}")
        if not 0 <= self.priority <= 9:
            raise UsageError(f"priority is 0 to 9, not {self.priority}")


class Job(msgspec.Struct, frozen=True):
    """An enqueued call.

    Attributes:
        id: The message's id. While the message is stored, enqueueing again under the id stores nothing. When the message
            is done, its id is free again, unless the store keeps what is done (the URL option `keep_done`).
        queue: The queue that it is in.
    """

    id: str
    queue: str


class Call(msgspec.Struct, frozen=True):
    """A call not yet enqueued: what `Tasks.enqueue_many` takes."""

    queue: str
    draft: Draft
    # Of the span in which it was made, where somebody traces.
    trace: Any = None


class Handler:
    """A function that messages of one queue are given to, and its options."""

    def __init__(self, function: Callable[..., Any], name: str, options: Options) -> None:
        self.function = function
        self.name = name
        self.options = options
        self.kind = _kind(function, name, options)
        self.signature = Signature(function, Context)
        # The worker fills in a first parameter annotated `Context`.
        self.takes_context = self.signature.takes_injected

    @property
    def queue(self) -> str:
        """The queue whose messages it takes."""
        return self.options.queue


class RawHandler(Handler):
    """A handler of messages that no qworker wrote: it gets the `Message`, and a `Context` before it if it asks for one."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        super().__init__(function, getattr(function, "__name__", "handler"), options)
        _check_raw(function, self.name)

    def __call__(self, message: Message) -> Any:
        """Just the function."""
        if self.takes_context:
            return self.function(Context(message=message, task=self.name), message)
        return self.function(message)


class Task(Handler, Generic[P, R]):
    """A registered function: call it directly, or enqueue a call of it."""

    def __init__(self, tasks: Tasks, function: Callable[..., R], name: str, options: Options) -> None:
        super().__init__(function, name, options)
        self._tasks = tasks
        self.encoder = EnvelopeEncoder(name)
        self._plain: BoundTask[P, R] = BoundTask(tasks, self, {})
        self.__doc__ = function.__doc__
        self.__name__ = name
        self.__module__ = function.__module__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<task {self.name} on {self.queue}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Just the function: nothing is enqueued."""
        if self.takes_context:
            message = Message(id="direct-call", queue=self.queue, body=b"")
            args_given = (Context(message=message, task=self.name), *args)
        else:
            args_given = args
        result: R = self.function(*args_given, **kwargs)
        return result

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """A call for `Tasks.enqueue_many`.

        Raises:
            BadArguments: the arguments do not fit.
        """
        return self._plain.call(*args, **kwargs)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call; it is stored durably when this returns.

        Raises:
            BadArguments: the arguments do not fit.
            BackendError: it was not stored, or perhaps (`PublishFailed`).
        """
        return await self._plain.enqueue(*args, **kwargs)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """`enqueue` for code without an event loop; blocks until the call is stored.

        Raises:
            UsageError: an event loop runs in this thread: await `enqueue` there.
        """
        return self._plain.enqueue_sync(*args, **kwargs)

    def using(
        self,
        *,
        delay: float | None = None,
        due_at: float | None = None,
        priority: int | None = None,
        key: str | None = None,
        id: str | None = None,  # noqa: A002
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> BoundTask[P, R]:
        """The task with options for the calls that follow.

        Args:
            delay: seconds until the call may run.
            due_at: Unix seconds at which it may run, instead of `delay`.
            priority: 0 (default) to 9 (first).
            key: while a call with this key waits or runs, another is not stored.
            id: the message's id; enqueueing again under it stores nothing while that message is stored.
            queue: another queue than the task's own.
            headers: strings that travel with the call.

        Raises:
            BadName: `key`, `id` or `queue` is not allowed.
            UsageError: `delay` or `priority` is out of range.
        """
        fields: dict[str, Any] = {}
        if delay is not None:
            if delay < 0:
                raise UsageError(f"delay is at least 0 seconds, not {delay}")
            fields["delay"] = float(delay)
        if due_at is not None:
            fields["due_at"] = float(due_at)
        if priority is not None:
            if not 0 <= priority <= 9:
                raise UsageError(f"priority is 0 to 9, not {priority}")
            fields["priority"] = priority
        if key is not None:
            fields["key"] = check_key(key)
        if id is not None:
            fields["id"] = check_id(id)
        return BoundTask(self._tasks, self, fields, queue=queue, headers=headers)


class BoundTask(Generic[P, R]):
    """A task and the options of its next calls; made by `Task.using`."""

    __slots__ = ("_draft", "_headers", "_queue", "_task", "_tasks")

    def __init__(
        self,
        tasks: Tasks,
        task: Task[P, R],
        draft: Mapping[str, Any],
        *,
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._tasks = tasks
        self._task = task
        self._draft = dict(draft)
        if task.options.priority:
            self._draft.setdefault("priority", task.options.priority)
        self._queue = check_queue(queue) if queue is not None else task.options.queue
        self._headers = dict(headers or {})

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """A call for `Tasks.enqueue_many`; see `Task.call`."""
        if not imported():
            return Call(self._queue, self._drafted(args, kwargs))
        with creating(self._queue, self._task.name) as span:
            draft = self._drafted(args, kwargs)
            return Call(self._queue, draft, None if span is None else span.get_span_context())

    def _drafted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draft:
        task = self._task
        task.signature.check(args, kwargs)
        headers = self._tasks.headers_for(self._headers)
        return Draft(body=task.encoder.encode(args, kwargs, headers), task=task.name, **self._draft)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call; see `Task.enqueue`."""
        if not imported():
            return await self._publish(self._drafted(args, kwargs), None)
        with sending(self._queue, self._task.name) as span:
            return await self._publish(self._drafted(args, kwargs), span)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """Enqueue a call and block; see `Task.enqueue_sync`."""
        with sending(self._queue, self._task.name) as span:
            # Made in this thread: sources of headers may look at what belongs to it.
            draft = self._drafted(args, kwargs)
            return self._tasks.run_sync(self._publish(draft, span), instead="await enqueue()")

    async def _publish(self, draft: Draft, span: Any) -> Job:
        backend = await self._tasks.backend()
        (message_id,) = await backend.publish(self._queue, (draft,))
        if span is not None:
            span.set_attributes({"messaging.message.id": message_id, "messaging.message.body.size": len(draft.body)})
        return Job(message_id, self._queue)


def _kind(function: Callable[..., Any], name: str, options: Options) -> Kind:
    target: Any = function
    while hasattr(target, "func"):
        target = target.func
    is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004
    if options.process:
        if is_async:
            raise UsageError(f"task {name!r}: process=True runs plain functions: write `def`, not `async def`")
        return "process"
    return "async" if is_async else "thread"


def _check_raw(function: Callable[..., Any], name: str) -> None:
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if not 1 <= len(needed) <= 2:
        raise UsageError(f"handler {name!r} takes a Message (and a Context before it, if it wants one)")
