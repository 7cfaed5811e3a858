"""The app: a registry of tasks and handlers, which opens the backend and enqueues calls."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from qworker.attempt.hooks import Hook, check_hooks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.call import Call
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.context import Context
from qworker.definition.callables import check_handler, handler_name
from qworker.definition.hints import exact_options
from qworker.definition.task_options import DEFAULT_MAX_TRIES
from qworker.enqueue.portal import run_blocking
from qworker.enqueue.tracing import send_batch_span, trace_headers
from qworker.errors import DuplicateTask, UnknownTask, UsageError
from qworker.failed_call import FailureCode, check_holds, check_on_failure, failure_report
from qworker.jobs.app_jobs import cancel_many, iterate_jobs, job_of, jobs_of, unfinished_states
from qworker.jobs.cancel import CancelCounts
from qworker.jobs.job import Job
from qworker.jobs.status import JobState, Status
from qworker.jobs.support import refuse_results
from qworker.message import Draft, Message
from qworker.message import State as MessageState
from qworker.parcel import unpack
from qworker.retry import DEFAULT_BACKOFF, Backoff
from qworker.schedules.code import CodeSchedule, check_scheme
from qworker.schedules.control import Schedules
from qworker.schedules.schedule import CatchUp, Overlap
from qworker.settings import backend_url
from qworker.task import RawHandler, Task, TaskOptions
from qworker.validation import check_headers, check_text, shown

__all__ = ["Tasks"]

if TYPE_CHECKING:
    import typing_extensions

    # The type that the lifespan yields. Only type checkers need the default.
    State = typing_extensions.TypeVar("State", default=Any)
else:
    State = TypeVar("State")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
AnyTask = TypeVar("AnyTask", bound=Task[..., Any])

# `enqueue_many` publishes this many at a time, so that a generator of a million calls needs no memory for them.
_BATCH = 1000


class Tasks(Generic[State]):
    """An app: register functions with `task` and `raw_handler`, enqueue calls of them, and run them with a worker.

    A type checker takes `State` from `lifespan`. Handlers that use it annotate their first parameter `Context[State]`.

    Args:
        url: The URL of the backend. None: `$QWORKER_URL` or `url` in `[tool.qworker]`, when it is first needed.
        lifespan: A function that takes the app and returns an async context manager. A worker enters it before its
            first message and leaves it after its last one. `Context.state` is what it yields.
        credential_provider: A function, plain or async, that returns the password of a Redis, or (user, password). It
            is called for each new connection. Or a `CredentialProvider` of redis-py. The command line and scaling with
            `--workers MIN-MAX` do not have the app: for them write `?credential_provider=package.module:name` in the
            URL instead.
        hooks: What runs around every handler, the outermost first, and for every call that is enqueued.

    Attributes:
        lifespan: The `lifespan` argument.
        hooks: The hooks of the app.
        clock: The clock of its backends. Tests set a fake one before the first call.
        registered_tasks: The tasks by name.
        raw_handlers: The raw handlers by queue.
        schedules: Puts, removes, pauses and lists schedules.
    """

    @exact_options
    def __init__(
        self,
        url: str | None = None,
        *,
        lifespan: Callable[[Tasks[Any]], AbstractAsyncContextManager[State]] | None = None,
        credential_provider: Callable[[], Any] | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self._url = None if url is None else check_text("url", url)
        self.lifespan = _check_lifespan(lifespan)
        self.hooks = check_hooks(hooks)
        self._credential_provider = credential_provider
        self.clock: Clock = SYSTEM_CLOCK
        self.registered_tasks: dict[str, Task[..., Any]] = {}
        self.raw_handlers: dict[str, RawHandler] = {}
        self.schedules = Schedules(self)
        self._backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBackend] = weakref.WeakKeyDictionary()
        # The last backend that was used. Each call needs it, and most apps have a single loop.
        self._latest: _LoopBackend | None = None
        self._header_sources: list[Callable[[], Mapping[str, str]]] = []

    def __repr__(self) -> str:
        return f"<Tasks {', '.join(sorted(self.registered_tasks)) or 'empty'}>"

    # -- registering -------------------------------------------------------------------------------------------------

    @overload
    def task(self, function: Callable[Concatenate[Context[State], P], R], /) -> Task[P, R]: ...

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        max_tries: int = DEFAULT_MAX_TRIES,
        timeout: float | timedelta | None = None,
        backoff: Backoff = DEFAULT_BACKOFF,
        process: bool = False,
        priority: int = 0,
        hold: float | timedelta = 0.0,
        result: float | timedelta | None = None,
        hooks: Sequence[Hook] = (),
        on_failure: Task[..., Any] | None = None,
    ) -> _Decorator[State]: ...

    @exact_options
    def task(  # noqa: PLR0913 - each argument is one option of a task
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        queue: str = "default",
        max_tries: int = DEFAULT_MAX_TRIES,
        timeout: float | timedelta | None = None,
        backoff: Backoff = DEFAULT_BACKOFF,
        process: bool = False,
        priority: int = 0,
        hold: float | timedelta = 0.0,
        result: float | timedelta | None = None,
        hooks: Sequence[Hook] = (),
        on_failure: Task[..., Any] | None = None,
    ) -> Any:
        """Register a function as a task.

        Args:
            function: The handler. Its first parameter may be a `Context`.
            name: The name of the task in envelopes. The default is the function's name.
            queue: The queue of its calls.
            max_tries: After this many failed attempts a message is failed and kept.
            timeout: Seconds that an attempt may take, or a timedelta. None: no limit.
            backoff: The delays of its retries.
            process: Whether it runs in a process pool, for plain functions that hold the GIL.
            priority: 0 (default) to 9 (first), for calls without their own priority.
            hold: Seconds from the enqueue for which the id of a call stays taken although its message is gone, or a
                timedelta. It counts for calls that have an id.
            result: Seconds for which the result of a call is kept after the end of the call, or a timedelta. None: it
                is not kept, and `Job.result` is refused.
            hooks: What runs around its attempts, inside the hooks of the app, the outermost first.
            on_failure: The task that is enqueued, with a `FailedCall`, once when a message has failed permanently.

        Raises:
            DuplicateTask: The name is already used.
            NotSupported: There is a result, and the backend of the app's URL has no place for it.
            UsageError: An option, the function or one of its annotations is not valid.
        """
        if name is not None and not check_text("name", name):
            raise UsageError("name must not be empty: leave it out to use the function's name")
        given: Any = timeout
        held: Any = hold
        kept: Any = result
        options = TaskOptions(
            queue=queue,
            max_tries=max_tries,
            timeout=given,
            backoff=backoff,
            process=process,
            priority=priority,
            hold=held,
            result=kept,
        )
        around = (*self.hooks, *check_hooks(hooks))
        decorator = _Decorator(self, name, options, around, check_on_failure(self, on_failure))
        return decorator if function is None else decorator(function)

    @exact_options
    def cron(
        self,
        expression: str,
        *,
        name: str | None = None,
        args: Sequence[Any] = (),
        tz: str = "UTC",
        catch_up: CatchUp = "latest",
        overlap: Overlap = "allow",
    ) -> Callable[[AnyTask], AnyTask]:
        """Let the workers enqueue a call of a task at the times of a cron expression. Write it above `@tasks.task`.

        A task can have several schedules. Each tick is enqueued once, however many workers there are.

        Args:
            expression: The minute, hour, day of the month, month and day of the week, or 6 fields with the seconds
                first.
            name: The name of the schedule. The default is the task's name.
            args: The arguments of the calls.
            tz: The time zone of the expression.
            catch_up: What happens with the ticks that no worker was there for: `latest` runs the last of them, `all`
                runs at most 100, `none` runs none. Ticks that are missed for longer than 20 periods, or for a day,
                never run.
            overlap: `skip`: a tick is skipped while the call of an earlier one waits or runs.

        Raises:
            UsageError: An option is not valid, or the name is already used.
            NotSupported: The backend of the app's URL does not support schedules.
        """

        def register(task: AnyTask) -> AnyTask:
            options = {"cron": expression, "tz": tz, "catch_up": catch_up, "overlap": overlap}
            self._add_schedule(CodeSchedule(task, "@tasks.cron", name, args, options))
            return task

        return register

    @exact_options
    def every(
        self,
        seconds: float | timedelta,
        *,
        name: str | None = None,
        args: Sequence[Any] = (),
        catch_up: CatchUp = "latest",
        overlap: Overlap = "allow",
    ) -> Callable[[AnyTask], AnyTask]:
        """Let the workers enqueue a call of a task at an interval. Write it above `@tasks.task`.

        Args:
            seconds: Whole seconds between two ticks, at least 1, or a timedelta. Ticks are its multiples since the
                epoch, so a restart never shifts them.
            name: See `cron`.
            args: See `cron`.
            catch_up: See `cron`.
            overlap: See `cron`.

        Raises:
            UsageError: An option is not valid, or the name is already used.
            NotSupported: The backend of the app's URL does not support schedules.
        """

        def register(task: AnyTask) -> AnyTask:
            options = {"every": seconds, "catch_up": catch_up, "overlap": overlap}
            self._add_schedule(CodeSchedule(task, "@tasks.every", name, args, options))
            return task

        return register

    def _add_schedule(self, schedule: CodeSchedule) -> None:
        if self._url is not None:
            check_scheme(self._url)
        self.schedules.add(schedule)

    @exact_options
    def raw_handler(
        self,
        *,
        queue: str = "default",
        max_tries: int = DEFAULT_MAX_TRIES,
        timeout: float | timedelta | None = None,
        backoff: Backoff = DEFAULT_BACKOFF,
        process: bool = False,
        hooks: Sequence[Hook] = (),
    ) -> Callable[[F], F]:
        """Register a function for a queue's raw messages: those that are not an envelope of a registered task.

        The function takes a `Message`, and a `Context` before it if its first parameter is annotated with it.

        Raises:
            DuplicateTask: The queue already has a raw handler.
            UsageError: An option or the function is not valid.
        """
        given: Any = timeout
        options = TaskOptions(queue=queue, max_tries=max_tries, timeout=given, backoff=backoff, process=process)
        around = (*self.hooks, *check_hooks(hooks))

        def register(function: F) -> F:
            _check(function, "@tasks.raw_handler")
            if queue in self.raw_handlers:
                raise DuplicateTask(
                    f"the queue {queue!r} already has a raw handler ({self.raw_handlers[queue].name}):"
                    " a queue can have only one"
                )
            self.raw_handlers[queue] = RawHandler(function, options, around)
            return function

        return register

    def register(self, task: Task[..., Any]) -> None:
        """Register a task that this app has created.

        Raises:
            DuplicateTask: Its name is already used.
            UsageError: It is not a task, or its calls go to the backend of another app.
        """
        given: Any = task
        if not isinstance(given, Task):
            raise UsageError(f"register() takes a task (got {shown(task)}): register a function with @tasks.task")
        if not task.belongs_to(self):
            raise UsageError(
                f"the task {task.name!r} belongs to another app, and its calls go to that app's backend:"
                " register its function here, with tasks.task(the_task.function)"
            )
        if task.name in self.registered_tasks:
            raise DuplicateTask(
                f"the task name {task.name!r} is already used: give one of the two tasks another name (name=...)"
            )
        self.registered_tasks[task.name] = task

    def __getitem__(self, name: str) -> Task[..., Any]:
        """Return the task with this name.

        Raises:
            UnknownTask: No task has this name.
        """
        try:
            return self.registered_tasks[name]
        except KeyError:
            known = ", ".join(sorted(self.registered_tasks)) or "none"
            raise UnknownTask(f"unknown task {name!r}: this app has {known}") from None

    def queue_names(self) -> list[str]:
        """Return the queues of all tasks and handlers, sorted. `qworker run` works on these by default."""
        return sorted({task.queue for task in self.registered_tasks.values()} | set(self.raw_handlers))

    # -- enqueueing --------------------------------------------------------------------------------------------------

    def _collect_headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a call: those of every source (see `add_header_source`), overridden by `given`."""
        headers = dict(trace_headers())
        for source in self._header_sources:
            found = source()
            check_headers(found, source)
            headers.update(found)
        headers.update(given)
        return headers

    def add_header_source(self, source: Callable[[], Mapping[str, str]]) -> None:
        """Add a function whose result is in the headers of every envelope, such as the trace context.

        Args:
            source: Returns texts by name. If it returns something else, the call that enqueues raises `UsageError`.
        """
        if not callable(source):
            raise UsageError(f"add_header_source() takes a function that returns headers (got {shown(source)})")
        self._header_sources.append(source)

    async def enqueue_many(self, calls: Iterable[Call]) -> list[Job[Any]]:
        """Enqueue calls in their order, in batches. All are stored durably when this returns.

        After an error the calls before the failing batch are stored. Calls with `using(id=...)` can be enqueued again.

        Raises:
            UsageError: An item is not a call. The calls before its batch are stored.
            BackendError: A batch was not stored, or it is unknown whether it was (`PublishUncertain`).
        """
        jobs: list[Job[Any]] = []
        backend = await self.backend()
        batch: list[Call] = []
        for call in calls:
            if type(call) is not Call:
                raise UsageError(f"enqueue_many() takes calls (got {shown(call)}): make each with task.call(...)")
            if batch and (call.queue != batch[0].queue or len(batch) >= _BATCH):
                jobs.extend(await _publish(backend, batch))
                batch = []
            batch.append(call)
        if batch:
            jobs.extend(await _publish(backend, batch))
        return jobs

    def enqueue_many_sync(self, calls: Iterable[Call]) -> list[Job[Any]]:
        """Enqueue calls from code without an event loop, as `enqueue_many` does.

        Raises:
            UsageError: An event loop is running in this thread.
        """
        return self._run_sync(self.enqueue_many(calls), instead="`await tasks.enqueue_many(...)`")

    def _run_sync(self, coroutine: Coroutine[Any, Any, R], *, instead: str = "`await`") -> R:
        """Run a coroutine on the background loop of this process and block until it is done.

        Args:
            coroutine: The coroutine.
            instead: The code to use in a running event loop, for the error text.

        Raises:
            UsageError: An event loop is running in this thread.
        """
        return run_blocking(coroutine, instead=instead)

    # -- jobs --------------------------------------------------------------------------------------------------------

    @overload
    def job(self, id: str, queue: str = "default") -> Job[Any]: ...

    @overload
    def job(self, id: str, queue: str, type: type[T]) -> Job[T]: ...

    def job(self, id: str, queue: str = "default", type: Any = Any) -> Job[Any]:  # noqa: A002
        """Return the job of a call that was enqueued before, without its task. Nothing is read.

        Args:
            id: The id of the call, as it was given or as `Job.id`.
            queue: Its queue.
            type: The type of its result.

        Raises:
            InvalidName: The id or the name of the queue is not allowed.
        """
        return job_of(self, id, queue, type)

    def jobs(
        self,
        *,
        state: JobState | None = None,
        task: str | Task[..., Any] | None = None,
        queue: str | None = None,
    ) -> AsyncGenerator[Status]:
        """Return the status of each job, page by page.

        Args:
            state: Only jobs in this state: `ready`, `delayed`, `leased`, `done` or `failed`. None: all of them.
            task: Only jobs of this task.
            queue: Only jobs of this queue. None: those of every queue of the app.

        Raises:
            UsageError: The state is not known.
        """
        states = list(MessageState) if state is None else [MessageState.of_word(state)]
        return jobs_of(self, self.queue_names(), states, _task_name(task), queue)

    def jobs_sync(
        self,
        *,
        state: JobState | None = None,
        task: str | Task[..., Any] | None = None,
        queue: str | None = None,
    ) -> Generator[Status]:
        """Return the status of each job from code without an event loop. See `jobs`."""
        return iterate_jobs(self, self.jobs(state=state, task=task, queue=queue))

    async def cancel(
        self,
        jobs: Iterable[Job[Any]] | None = None,
        *,
        task: str | Task[..., Any] | None = None,
        queue: str | None = None,
        state: JobState | None = None,
        by: str = "",
    ) -> CancelCounts:
        """Cancel many jobs. See `Job.cancel`.

        Args:
            jobs: The jobs. None: those that match the other arguments, of which at least one is given.
            task: The jobs of this task.
            queue: The jobs of this queue.
            state: The jobs in this state: `ready`, `delayed` or `leased`.
            by: The user or program that cancels them, for the reason that is kept with the messages.

        Raises:
            UsageError: Neither jobs nor an argument to find them are given, or both are.
            NotSupported: The store can neither cancel nor remove messages.
        """
        if (jobs is None) == (task is None and queue is None and state is None):
            raise UsageError("cancel() takes jobs, or one of task=, queue= and state= to find them")
        found = jobs_of(self, self.queue_names(), unfinished_states(state), _task_name(task), queue)
        return await cancel_many(self, jobs, found, by)

    def cancel_sync(
        self,
        jobs: Iterable[Job[Any]] | None = None,
        *,
        task: str | Task[..., Any] | None = None,
        queue: str | None = None,
        state: JobState | None = None,
        by: str = "",
    ) -> CancelCounts:
        """Cancel many jobs from code without an event loop. See `cancel`."""
        call = self.cancel(jobs, task=task, queue=queue, state=state, by=by)
        return self._run_sync(call, instead="await tasks.cancel(...)")

    def _failure_report(self, task: str, message: Message, code: FailureCode, error: str) -> tuple[str, Draft] | None:
        """Return the queue and the message of the call that reports a failure, or None if the task wants none."""
        known = self.registered_tasks.get(task)
        if known is None or known.on_failure is None:
            return None
        report = failure_report(known.on_failure, unpack(message), task, code=code, error=error, tries=message.tries)
        return report.queue, report.draft

    def _check_results(self, task: str) -> None:
        """Refuse a task that keeps results if the store is known and has no place for them."""
        try:
            url = self.url
        except UsageError:
            # An app factory sets it later.
            return
        refuse_results(url, task)

    # -- the backend -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The backend's URL.

        Raises:
            UsageError: No URL is set.
        """
        return backend_url(self._url)

    @url.setter
    def url(self, url: str | None) -> None:
        for task in self.registered_tasks.values():
            if url is not None and task.options.result is not None:
                refuse_results(url, task.name)
        # Open backends belong to the old URL. The loops close them.
        self._url = url
        self._backends = weakref.WeakKeyDictionary()
        self._latest = None

    def _use_url(self, url: str) -> None:
        if self._url != url:
            self.url = url

    async def backend(self) -> Backend:
        """Return this event loop's backend. It is opened at the first call and closed when the loop shuts down.

        Calls inside of `asyncio.run` need no open and close: an asynchronous generator holds the backend, and loops
        close these.
        """
        loop = asyncio.get_running_loop()
        opened = self._latest
        if opened is None or opened.loop() is not loop:
            opened = self._backends.get(loop)
            if opened is None:
                opened = self._backends[loop] = _LoopBackend(loop, self._make_backend())
            self._latest = opened
        if not opened.ready:
            await opened.open()
        return opened.backend

    def _make_backend(self) -> Backend:
        return open_backend(self.url, clock=self.clock, credential_provider=self._credential_provider)

    async def aclose(self) -> None:
        """Close this event loop's backend now. The next call opens a new one."""
        opened = self._backends.pop(asyncio.get_running_loop(), None)
        self._latest = None
        if opened is not None:
            await opened.aclose()


class _LoopBackend:
    """The backend of one event loop, and the generator that closes it with the loop."""

    __slots__ = ("_closer", "_lock", "backend", "loop", "ready")

    def __init__(self, loop: asyncio.AbstractEventLoop, backend: Backend) -> None:
        self.loop = weakref.ref(loop)
        self.backend = backend
        self.ready = False
        self._lock = asyncio.Lock()
        self._closer: AsyncGenerator[None] = _close_with_loop(backend)

    async def open(self) -> None:
        async with self._lock:
            if not self.ready:
                try:
                    await self.backend.open()
                except Exception:
                    # Nothing else closes what the backend already holds, such as a connection to a server that refuses.
                    await self.backend.aclose()
                    raise
                await anext(self._closer)
                self.ready = True

    async def aclose(self) -> None:
        if self.ready:
            await self._closer.aclose()
        else:
            await self.backend.aclose()


async def _close_with_loop(backend: Backend) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await backend.aclose()


async def _publish(backend: Backend, calls: list[Call]) -> list[Job[Any]]:
    queue = calls[0].queue
    with send_batch_span(queue, [call.span_context for call in calls]):
        ids = await backend.publish(queue, [call.draft for call in calls])
    return [call.job(message_id) for call, message_id in zip(calls, ids, strict=True)]


class _Decorator(Generic[State]):
    """`@tasks.task(...)`, typed for functions with and without a `Context`."""

    __slots__ = ("_hooks", "_name", "_on_failure", "_options", "_tasks")

    def __init__(
        self,
        tasks: Tasks[State],
        name: str | None,
        options: TaskOptions,
        hooks: tuple[Hook, ...],
        on_failure: Task[..., Any] | None,
    ) -> None:
        self._tasks = tasks
        self._name = name
        self._options = options
        self._hooks = hooks
        self._on_failure = on_failure

    @overload
    def __call__(self, function: Callable[Concatenate[Context[State], P], R], /) -> Task[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    def __call__(self, function: Callable[..., Any], /) -> Any:
        _check(function, "@tasks.task")
        name = self._name or handler_name(function)
        task: Task[..., Any] = Task(self._tasks, function, name, self._options, self._hooks)
        if self._on_failure is not None:
            check_holds(self._tasks._url, name)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            task.on_failure = self._on_failure
        self._tasks.register(task)
        return task


def _task_name(task: str | Task[..., Any] | None) -> str | None:
    return task.name if isinstance(task, Task) else task


def _check_lifespan(lifespan: Any) -> Any:
    if lifespan is not None and not callable(lifespan):
        raise UsageError(f"lifespan must be a function that takes the app (got {shown(lifespan)})")
    if inspect.isasyncgenfunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        raise UsageError(
            f"lifespan must return a context manager: write @asynccontextmanager above {handler_name(lifespan)}"
        )
    return lifespan


def _check(function: Any, decorator: str) -> None:
    if isinstance(function, Task):
        raise UsageError(f"{decorator}: {function.name!r} is already a task: decorate a function once")
    check_handler(function, decorator)
