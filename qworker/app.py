"""The app: a registry of tasks and handlers, which opens the backend and enqueues calls."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from qworker.attempt.hooks import Hook, check_hooks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.backend.store_rules import StoreRules
from qworker.call import Call
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.context import Context
from qworker.definition.callables import check_handler, handler_name
from qworker.definition.hints import exact_options
from qworker.definition.task_options import DEFAULT_MAX_TRIES, NeedyOption
from qworker.duration import Moment, Seconds
from qworker.enqueue.batches import BATCH, publish_calls
from qworker.enqueue.buffer import buffered, buffered_sync, collect, innermost
from qworker.enqueue.portal import run_blocking
from qworker.enqueue.tracing import trace_headers
from qworker.errors import DuplicateTask, UnknownTask, UsageError
from qworker.failed_call import check_holds, check_on_failure, failure_report
from qworker.failure_text import FailureCode
from qworker.failures.app_failures import make_filter, requeue_in
from qworker.failures.bulk import Requeued
from qworker.inclusion import Inclusion
from qworker.jobs.app_jobs import cancel_many, iterate_jobs, job_of, jobs_of, unfinished_states
from qworker.jobs.cancel import CancelCounts
from qworker.jobs.job import Job
from qworker.jobs.status import JobState, Status
from qworker.jobs.support import refuse
from qworker.message import Draft, Message
from qworker.message import State as MessageState
from qworker.named_task import NamedTask
from qworker.names import check_existing_queue
from qworker.parcel import unpack
from qworker.retry import DEFAULT_BACKOFF, MOST_DELAY, Errors, Retries, RetryOption
from qworker.schedules.code import CodeSchedule, check_scheme
from qworker.schedules.control import Schedules
from qworker.schedules.schedule import CatchUp, Overlap
from qworker.settings import backend_url
from qworker.task import RawHandler, Task, TaskOptions
from qworker.unique import Unique
from qworker.validation import check_flag, check_headers, check_seconds, check_text, shown

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

# Seconds for which a call that does not fit its task's signature is tried again, because a deploy may be running.
_UNKNOWN_FOR = timedelta(minutes=10)


class StandIn(Protocol):
    """A store that tests put in the place of the app's own."""

    @property
    def url(self) -> str:
        """Its URL."""
        ...

    def create(self) -> Backend:
        """Create its backend for one event loop."""
        ...


class Tasks(Generic[State]):
    """An app: register functions with `task` and `raw_handler`, enqueue calls of them, and run them with a worker.

    A type checker takes `State` from `lifespan`. Handlers that use it annotate their first parameter `Context[State]`.

    Args:
        url: The URL of the backend. None: the URL that is set with `tasks.url = ...` before the first call. Without
            it, `$QWORKER_URL` or `url` in `[tool.qworker]`.
        lifespan: A function that takes the app and returns an async context manager. A worker enters it before its
            first message and leaves it after its last one. `Context.state` is what it yields.
        credential_provider: A function, plain or async, that returns the password of a Redis, or (user, password). It
            is called for each new connection. Or a `CredentialProvider` of redis-py. The command line and scaling with
            `--workers MIN-MAX` do not have the app: for them write `?credential_provider=package.module:name` in the
            URL instead.
        imports: The names of modules with tasks. `qworker run` imports them, and so do the processes of handlers. A
            process that only publishes does not.
        unknown_for: Seconds, or a timedelta. If the arguments of a call do not fit the signature of its task, another
            version of the app may have enqueued it. So workers release it for this time after its first refusal.
            After this time it fails. 0: it fails immediately.
        hooks: What runs around every handler, the outermost first, and for every call that is enqueued.
        validate: Whether calls check the values of their arguments against the annotations when they are enqueued.

    Attributes:
        lifespan: The `lifespan` argument.
        imports: The `imports` argument.
        unknown_for: The `unknown_for` argument, in seconds.
        hooks: The hooks of the app.
        validate: The `validate` argument.
        clock: The clock of its backends. Tests set a fake one before the first call.
        registered_tasks: The tasks by name.
        raw_handlers: The raw handlers by queue.
    """

    @exact_options
    def __init__(
        self,
        url: str | None = None,
        *,
        lifespan: Callable[[Tasks[Any]], AbstractAsyncContextManager[State]] | None = None,
        credential_provider: Callable[[], Any] | None = None,
        imports: Sequence[str] = (),
        unknown_for: Seconds = _UNKNOWN_FOR,
        hooks: Sequence[Hook] = (),
        validate: bool = True,
    ) -> None:
        self._url = None if url is None else check_text("url", url)
        # Whether a backend was created with the URL: another one would divide the messages between two stores.
        self._url_in_use = False
        self._stand_in: StandIn | None = None
        self.imports = _check_imports(imports)
        self.unknown_for = check_seconds("unknown_for", unknown_for, most=MOST_DELAY)
        self.lifespan = _check_lifespan(lifespan)
        self.hooks = check_hooks(hooks)
        self.validate = check_flag("validate", validate)
        self._credential_provider = credential_provider
        self.clock: Clock = SYSTEM_CLOCK
        self.registered_tasks: dict[str, Task[..., Any]] = {}
        self.raw_handlers: dict[str, RawHandler] = {}
        self._schedules = Schedules(self)
        self._backends: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopBackend] = weakref.WeakKeyDictionary()
        # The last backend that was used. Each call needs it, and most apps have a single loop.
        self._latest: _LoopBackend | None = None
        # The options of its tasks and their calls that not every store supports, by task.
        self._needs: dict[tuple[str, NeedyOption], None] = {}
        # What its store refuses. None: it was not asked yet.
        self._store_rules: StoreRules | None = None
        self._header_sources: list[Callable[[], Mapping[str, str]]] = []
        # Where the tasks of this app are if another app includes them.
        self._inclusion: Inclusion[Tasks[Any]] | None = None
        # The module and the name that the command line has loaded the app from.
        self._loaded_from: tuple[str, str] | None = None

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
        max_tries: int | None = DEFAULT_MAX_TRIES,
        timeout: Seconds | None = None,
        retry: RetryOption = DEFAULT_BACKOFF,
        retry_on: Errors = (),
        fail_on: Errors = (),
        process: bool = False,
        priority: int = 0,
        hold: Seconds = 0.0,
        result: Seconds | None = None,
        unique: Unique | None = None,
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
        max_tries: int | None = DEFAULT_MAX_TRIES,
        timeout: Seconds | None = None,
        retry: RetryOption = DEFAULT_BACKOFF,
        retry_on: Errors = (),
        fail_on: Errors = (),
        process: bool = False,
        priority: int = 0,
        hold: Seconds = 0.0,
        result: Seconds | None = None,
        unique: Unique | None = None,
        hooks: Sequence[Hook] = (),
        on_failure: Task[..., Any] | None = None,
    ) -> Any:
        """Register a function as a task.

        Args:
            function: The handler. Its first parameter may be a `Context`.
            name: The name of the task in envelopes. The default is the function's name.
            queue: The queue of its calls.
            max_tries: After this many failed attempts a message is failed and kept. None: it is tried until it
                succeeds, unless 5 attempts in a row kill their process or lose their lease.
            timeout: Seconds that an attempt may take, or a timedelta. None: no limit.
            retry: The delays of its retries: a policy such as `Backoff` or `Delays`, a time, or a mapping of exception
                classes to these, in which the most derived class counts. `NoRetry` fails the message at once.
            retry_on: Exception classes. If there are any, another exception fails the message at once.
            fail_on: Exception classes that fail the message at once.
            process: Whether it runs in a process pool, for plain functions that hold the GIL.
            priority: 0 (default) to 9 (first), for calls without their own priority.
            hold: Seconds from the enqueue for which the id of a call stays taken although its message is gone, or a
                timedelta. It counts for calls that have an id.
            result: Seconds for which the result of a call is kept after the end of the call, or a timedelta. None: it
                is not kept, and `Job.result` is refused.
            unique: The unique key of its calls, such as `Unique(by=("user",))`: while a call with it waits or runs,
                another one is not stored.
            hooks: What runs around its attempts, inside the hooks of the app, the outermost first.
            on_failure: The task that is enqueued, with a `FailedCall`, once when a message has failed permanently.

        Raises:
            DuplicateTask: The name is already used.
            NotSupported: The backend of the app's URL does not support results, or unlimited tries.
            UsageError: An option, the function or one of its annotations is not valid.
        """
        if name is not None and not check_text("name", name):
            raise UsageError("name must not be empty: leave it out to use the function's name")
        options = _GivenOptions(
            queue=queue,
            max_tries=max_tries,
            timeout=timeout,
            retry=(retry, retry_on, fail_on),
            process=process,
            priority=priority,
            hold=hold,
            result=result,
            unique=unique,
        )
        around = (*self.hooks, *check_hooks(hooks))
        decorator = _Decorator(self, name, options, around, check_on_failure(self._destination().app, on_failure))
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
            self._add_schedule(CodeSchedule(task, "@tasks.cron", self._schedule_name(name), args, options))
            return task

        return register

    @exact_options
    def every(
        self,
        seconds: Seconds,
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
            self._add_schedule(CodeSchedule(task, "@tasks.every", self._schedule_name(name), args, options))
            return task

        return register

    def _schedule_name(self, name: str | None) -> str | None:
        # That of the task has the prefix already.
        return name if name is None else self._destination().prefix + check_text("name", name)

    def _add_schedule(self, schedule: CodeSchedule) -> None:
        url = self._destination().app._url  # noqa: SLF001
        if url is not None:
            check_scheme(url)
        self.schedules.add(schedule)

    @property
    def schedules(self) -> Schedules:
        """Puts, removes, pauses and lists schedules."""
        return self._destination().app._schedules  # noqa: SLF001

    @exact_options
    def raw_handler(
        self,
        *,
        queue: str = "default",
        max_tries: int | None = DEFAULT_MAX_TRIES,
        timeout: Seconds | None = None,
        retry: RetryOption = DEFAULT_BACKOFF,
        retry_on: Errors = (),
        fail_on: Errors = (),
        process: bool = False,
        hooks: Sequence[Hook] = (),
    ) -> Callable[[F], F]:
        """Register a function for a queue's raw messages: those that are not an envelope of a registered task.

        The function takes a `Message`, and a `Context` before it if its first parameter is annotated with it.

        Raises:
            DuplicateTask: The queue already has a raw handler.
            UsageError: An option or the function is not valid.
        """
        options = _GivenOptions(
            queue=queue,
            max_tries=max_tries,
            timeout=timeout,
            retry=(retry, retry_on, fail_on),
            process=process,
        )
        around = (*self.hooks, *check_hooks(hooks))

        def register(function: F) -> F:
            _check(function, "@tasks.raw_handler")
            checked = options.check(f"handler {handler_name(function)!r}")
            self._register_raw(RawHandler(function, checked, around))
            return function

        return register

    def _register(self, task: Task[..., Any]) -> None:
        """Add a task of this app, or of an app that is included here. If this app is included, it goes there."""
        there = self._destination()
        name = there.prefix + task.name
        if name in there.app.registered_tasks:
            raise DuplicateTask(
                f"the task name {name!r} is already used: give one of the two tasks another name (name=...)"
            )
        if there.app is not self:
            if task.on_failure is not None:
                check_holds(there.app._url, name)  # noqa: SLF001
            task.move(there.app, name, there.queue, there.hooks)
        there.app.registered_tasks[name] = task

    def _register_raw(self, handler: RawHandler) -> None:
        there = self._destination()
        if there.app is not self:
            handler.join(there.queue, there.hooks)
        taken = there.app.raw_handlers.get(handler.queue)
        if taken is not None:
            raise DuplicateTask(
                f"the queue {handler.queue!r} already has a raw handler ({taken.name}): a queue can have only one"
            )
        there.app._check_store(handler.name, handler.options.needs)  # noqa: SLF001
        there.app.raw_handlers[handler.queue] = handler

    @exact_options
    def include(self, other: Tasks[Any], *, prefix: str = "", queue: str | None = None) -> None:
        """Move the tasks, schedules and raw handlers of another app, such as a library's, to this one.

        Their calls go to this app's backend, also through `other` and its `using`. What is registered with `other`
        later comes here too, and its `imports` do. Its URL and `unknown_for` do not count any more.

        Args:
            other: The app. It can have neither a lifespan nor header sources.
            prefix: What their names begin with here, such as `lib.`, and those of schedules in the code.
            queue: Their queue here. None: each keeps its own.

        Raises:
            DuplicateTask: A name is already used, or two raw handlers have one queue. Nothing is moved.
            NotSupported: This app's backend does not support an option of a task. Nothing is moved.
            UsageError: The tasks already belong to another app, a hook of this app does not fit one of them, or an
                argument is not valid. Nothing is moved.
        """
        check_text("prefix", prefix)
        if queue is not None:
            check_existing_queue(check_text("queue", queue))
        there = self._destination()
        self._check_included(other)
        moved, moved_raw = list(other.registered_tasks.values()), list(other.raw_handlers.values())
        names = [there.prefix + prefix + task.name for task in moved]
        raw_queues = [there.queue or queue or handler.queue for handler in moved_raw]
        there.app._check_free(names, raw_queues)  # noqa: SLF001
        needs: dict[tuple[str, NeedyOption], None] = {}
        for name, handler in (*zip(names, moved, strict=True), *((raw.name, raw) for raw in moved_raw)):
            needs |= {(name, option): None for option in handler.options.needs}
            handler.check_joins(name, (*there.hooks, *self.hooks))
            if handler.on_failure is not None:
                check_holds(there.app._url, name)  # noqa: SLF001
        # Those of its calls come after those of its tasks, which have their new names.
        needs |= other._needs
        there.app._refuse(needs)  # noqa: SLF001
        if other._schedules.in_code and there.app._url is not None:  # noqa: SLF001
            check_scheme(there.app._url)  # noqa: SLF001
        there.app._schedules.include(other._schedules, there.prefix + prefix)  # noqa: SLF001
        there.app._needs |= needs  # noqa: SLF001
        there.app.imports += tuple(name for name in other.imports if name not in there.app.imports)
        other.registered_tasks, other.raw_handlers = {}, {}
        other._inclusion = Inclusion(self, prefix, queue, names[0] if names else None)
        other._forget_backends()
        for task in moved:
            other._register(task)
        for handler in moved_raw:
            other._register_raw(handler)

    def _destination(self) -> _Destination:
        """Return where the tasks of this app are."""
        app: Tasks[Any] = self
        prefix, queue = "", None
        hooks: tuple[Hook, ...] = ()
        while (inclusion := app._inclusion) is not None:
            app, prefix, queue = inclusion.app, inclusion.prefix + prefix, inclusion.queue or queue
            hooks = (*app.hooks, *hooks)
        return _Destination(app, prefix, queue, hooks)

    def _check_included(self, other: Any) -> None:
        """Check that an app can be included."""
        if not isinstance(other, Tasks):
            raise UsageError(f"include() takes the Tasks object of another app (got {shown(other)})")
        inclusion = other._inclusion  # noqa: SLF001
        if inclusion is not None:
            what = "the included app" if inclusion.example is None else f"task {inclusion.example!r}"
            whose = "this app" if inclusion.app is self else "another app"
            raise UsageError(f"{what} already belongs to {whose}: include its app once")
        if other is self._destination().app:
            raise UsageError("an app cannot include itself: include the app of a library in it")
        if other.lifespan is not None or other._header_sources:  # noqa: SLF001
            what = "a lifespan" if other.lifespan is not None else "header sources"
            raise UsageError(
                f"the included app has {what}, which include() does not move: give that to the app that includes it"
            )

    def _check_free(self, names: list[str], raw_queues: list[str]) -> None:
        for name in names:
            if name in self.registered_tasks:
                raise DuplicateTask(f"the task name {name!r} is already used: give include() another prefix=")
        for number, queue in enumerate(raw_queues):
            if queue in self.raw_handlers or queue in raw_queues[:number]:
                raise DuplicateTask(
                    f"the queue {queue!r} would have two raw handlers: a queue can have only one, so give include()"
                    " another queue="
                )

    @overload
    def named(self, name: str, *, queue: str | None = None) -> NamedTask[Any]: ...

    @overload
    def named(self, name: str, *, queue: str | None = None, result: type[T]) -> NamedTask[T]: ...

    @exact_options
    def named(self, name: str, *, queue: str | None = None, result: Any = Any) -> NamedTask[Any]:
        """Return a task by its name, to enqueue calls of it without importing its function.

        If this app has the task when a call is made, its options are used and the arguments are checked. Otherwise
        the worker checks them.

        Args:
            name: The name of the task in envelopes.
            queue: The queue of its calls. None: that of the task if this app has it, otherwise `default`.
            result: The type of its result, which `Job.result` returns. Without it, that of the task if this app has it.

        Raises:
            InvalidName: The queue is not allowed.
            UsageError: The name is empty or not text, or no JSON value can become the type.
        """
        return NamedTask(self, name, queue, result)

    def _find_task(self, name: str) -> Task[..., Any] | None:
        app, prefix, _, _ = self._destination()
        # The code of an included app uses the names that its tasks have there.
        return app.registered_tasks.get(prefix + name) or app.registered_tasks.get(name)

    def __getitem__(self, name: str) -> Task[..., Any]:
        """Return the task with this name.

        Raises:
            UnknownTask: No task has this name.
        """
        app, prefix, _, _ = self._destination()
        try:
            return app.registered_tasks[prefix + name]
        except KeyError:
            known = ", ".join(sorted(app.registered_tasks)) or "none"
            hint = ""
            if app.imports:
                hint = f"; `qworker run` also imports {', '.join(app.imports)}: without them, use tasks.named({name!r})"
            raise UnknownTask(f"unknown task {name!r}: this app has {known}{hint}") from None

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
        if self._inclusion is not None:
            raise UsageError("another app includes this one: call add_header_source() of that app")
        self._header_sources.append(source)

    async def enqueue_many(self, calls: Iterable[Call]) -> list[Job[Any]]:
        """Enqueue calls in their order, in batches. All are stored durably when this returns, or a block has ended.

        After an error the calls before the failing batch are stored. Calls with `using(id=...)` can be enqueued again.

        Raises:
            UsageError: An item is not a call. The calls before its batch are stored.
            BackendError: A batch was not stored, or it is unknown whether it was (`PublishUncertain`).
        """
        jobs: list[Job[Any]] = []
        batch: list[Call] = []
        for call in calls:
            if type(call) is not Call:
                raise UsageError(f"enqueue_many() takes calls (got {shown(call)}): make each with task.call(...)")
            if innermost() is not None and (job := collect(self._destination().app, call)) is not None:
                jobs.append(job)
                continue
            if batch and (call.queue != batch[0].queue or len(batch) >= BATCH):
                jobs.extend(await publish_calls(await self.backend(), batch))
                batch = []
            batch.append(call)
        if batch:
            jobs.extend(await publish_calls(await self.backend(), batch))
        return jobs

    def enqueue_many_sync(self, calls: Iterable[Call]) -> list[Job[Any]]:
        """Enqueue calls from code without an event loop, as `enqueue_many` does.

        Raises:
            UsageError: An event loop is running in this thread.
        """
        return self._run_sync(self.enqueue_many(calls), instead="`await tasks.enqueue_many(...)`")

    def buffered(self) -> AbstractAsyncContextManager[None]:
        """Return a block that collects the calls in it, and sends them in few batches when it ends.

        If the block raises, all its calls are dropped. The block counts for the calls of this app in the code in the
        block, and in the tasks and threads that copy its context (`asyncio.create_task`, `asyncio.to_thread`). An inner
        block gives its calls to the outer one when it ends. The calls of a task that outlives the block are sent at
        once.

        A call is checked when it is made, and its job has its id. After the block `Job.existed` is set. If another
        call has its unique key, `Job.id` and `Job.queue` become those of that call.

        Raises:
            EnqueueFailed: At the end, if some calls are not stored, or it is unknown whether they are.
            MessageTooLarge: At the call, if its body is larger than `max_body`.
            NotSupported: At the call, if the store takes no ids, or does not support an option of the call.
        """
        return buffered(self._destination().app)

    def buffered_sync(self) -> AbstractContextManager[None]:
        """Return a block that collects the calls in it, for code without an event loop. See `buffered`.

        Raises:
            UsageError: An event loop is running in this thread.
        """
        return buffered_sync(self._destination().app)

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
        return job_of(self._destination().app, id, queue, type)

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
        app = self._destination().app
        return jobs_of(app, app.queue_names(), states, self._task_name(task), queue)

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
        app = self._destination().app
        found = jobs_of(app, app.queue_names(), unfinished_states(state), self._task_name(task), queue)
        return await cancel_many(app, jobs, found, by)

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

    async def requeue(
        self,
        *,
        task: str | Task[..., Any] | None = None,
        queue: str | None = None,
        error: str | None = None,
        code: FailureCode | None = None,
        group: str | None = None,
        since: Moment | None = None,
    ) -> Requeued:
        """Make failed messages ready again, with tries 0: those that match all arguments, of which one is given.

        Messages with the code `poison` or `cancelled` are left out and counted, unless `code` or `group` names them.
        Messages that fail after the start of the call are not changed.

        Args:
            task: Calls of this task.
            queue: Messages of this queue. None: those of every queue of the app.
            error: Messages whose error contains this text, in any case.
            code: Messages that failed for this reason.
            group: Messages of this group, by its key from `qworker failures`.
            since: Messages that failed then or later: Unix seconds, or a datetime with a time zone.

        Raises:
            UsageError: No argument is given, or one is not valid.
            NotSupported: The store cannot requeue messages.
            AlreadyEnqueued: Another message has the unique key of one of them. All others are ready.
        """
        matching = make_filter(self._task_name(task), error, code, group, since)
        if matching.is_empty and queue is None:
            raise UsageError("requeue() takes at least one of task=, queue=, error=, code=, group= and since=")
        app = self._destination().app
        return await requeue_in(app, app.queue_names() if queue is None else [queue], matching)

    def requeue_sync(
        self,
        *,
        task: str | Task[..., Any] | None = None,
        queue: str | None = None,
        error: str | None = None,
        code: FailureCode | None = None,
        group: str | None = None,
        since: Moment | None = None,
    ) -> Requeued:
        """Make failed messages ready again from code without an event loop. See `requeue`."""
        call = self.requeue(task=task, queue=queue, error=error, code=code, group=group, since=since)
        return self._run_sync(call, instead="await tasks.requeue(...)")

    def _task_name(self, task: str | Task[..., Any] | None) -> str | None:
        if isinstance(task, Task):
            return task.name
        known = None if task is None else self._find_task(task)
        return task if known is None else known.name

    def _failure_report(self, task: str, message: Message, code: FailureCode, error: str) -> tuple[str, Draft] | None:
        """Return the queue and the message of the call that reports a failure, or None if the task wants none."""
        known = self._destination().app.registered_tasks.get(task)
        if known is None or known.on_failure is None:
            return None
        report = failure_report(known.on_failure, unpack(message), task, code=code, error=error, tries=message.tries)
        return report.queue, report.draft

    def _check_store(self, task: str, needs: Sequence[NeedyOption]) -> None:
        """Refuse options of a task or of its calls if the store does not support them, also if its URL is set later."""
        app = self._destination().app
        given: dict[tuple[str, NeedyOption], None] = {(task, option): None for option in needs}
        app._refuse(given)  # noqa: SLF001
        app._needs |= given  # noqa: SLF001

    def _refuse(self, needs: Iterable[tuple[str, NeedyOption]]) -> None:
        try:
            url = self.url
        except UsageError:
            # An app factory sets it later.
            return
        for task, option in needs:
            refuse(url, task, option)

    def _check_later(self, draft: Draft) -> None:
        """Check a draft that is published later for what the store would refuse."""
        app = self._destination().app
        if app._store_rules is None:  # noqa: SLF001
            app._store_rules = app._ask_store()  # noqa: SLF001
        app._store_rules.check_later(draft, app.clock.time())  # noqa: SLF001

    def _ask_store(self) -> StoreRules:
        try:
            # In tests too, where another store has its place.
            return StoreRules(self._make_own_backend())
        except UsageError:
            if self._stand_in is None:
                raise
            return StoreRules(self._stand_in.create())

    # -- the backend -------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The backend's URL. An app factory can set it, before the first call.

        Raises:
            UsageError: No URL is set. Or it is set after the first call, or in an app that another app includes.
        """
        if self._inclusion is not None:
            return self._inclusion.app.url
        return backend_url(self._url) if self._stand_in is None else self._stand_in.url

    @url.setter
    def url(self, url: str | None) -> None:
        if url is not None:
            check_text("url", url)
        if self._inclusion is not None:
            raise UsageError("another app includes this one: set the URL of that app")
        # A factory may be called again with the same settings.
        if self._url_in_use and url != self._url:
            raise UsageError("the URL of this app is already in use: set tasks.url before the first call")
        if url is not None:
            for task, option in self._needs:
                refuse(url, task, option)
        self._url = url
        self._store_rules = None

    def _import_modules(self, import_module: Callable[[str], object]) -> None:
        """Import the modules of `imports`, in their order. One may add some, because it includes another app."""
        done: set[str] = set()
        while missing := [name for name in self.imports if name not in done]:
            done.add(missing[0])
            import_module(missing[0])

    def _replace_url(self, url: str | None) -> None:
        """Set the URL in a process that does not choose it. Calls to the old one are the caller's concern."""
        if self._inclusion is not None:
            self._inclusion.app._replace_url(url)  # noqa: SLF001
            return
        self._url, self._url_in_use = url, False
        self._forget_backends()

    @contextmanager
    def _replaced_store(self, stand_in: StandIn, clock: Clock) -> Generator[None]:
        """Use another store in the place of the app's own inside the block."""
        before = self._stand_in, self.clock, self._url_in_use
        self._stand_in, self.clock, self._url_in_use = stand_in, clock, False
        self._forget_backends()
        try:
            yield
        finally:
            self._stand_in, self.clock, self._url_in_use = before
            self._forget_backends()

    def _forget_backends(self) -> None:
        """Open the backend again at the next call. The loops close the open ones."""
        self._backends = weakref.WeakKeyDictionary()
        self._latest = None
        self._store_rules = None

    async def backend(self) -> Backend:
        """Return this event loop's backend. It is opened at the first call and closed when the loop shuts down.

        Calls inside of `asyncio.run` need no open and close: an asynchronous generator holds the backend, and loops
        close these.
        """
        loop = asyncio.get_running_loop()
        opened = self._latest
        if opened is None or opened.loop() is not loop:
            if self._inclusion is not None:
                return await self._inclusion.app.backend()
            opened = self._backends.get(loop)
            if opened is None:
                opened = self._backends[loop] = _LoopBackend(loop, self._make_backend())
            self._latest = opened
        if not opened.ready:
            await opened.open()
        return opened.backend

    def _make_backend(self) -> Backend:
        backend = self._make_own_backend() if self._stand_in is None else self._stand_in.create()
        self._url_in_use = True
        return backend

    def _make_own_backend(self) -> Backend:
        url = backend_url(self._url)
        return open_backend(url, clock=self.clock, credential_provider=self._credential_provider)

    async def aclose(self) -> None:
        """Close this event loop's backend now. The next call opens a new one."""
        if self._inclusion is not None:
            await self._inclusion.app.aclose()
            return
        opened = self._backends.pop(asyncio.get_running_loop(), None)
        self._latest = None
        if opened is not None:
            await opened.aclose()


class _Destination(NamedTuple):
    """Where the tasks of an app are: in itself, or in the app that includes it."""

    app: Tasks[Any]
    prefix: str
    queue: str | None
    # The hooks of the apps that include it, the outermost first.
    hooks: tuple[Hook, ...]


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


class _GivenOptions:
    """The options of a handler as they are given. They are checked when the name of the handler is known."""

    def __init__(self, *, retry: tuple[Any, Any, Any], **options: Any) -> None:
        self._retry = retry
        self._options = options

    def check(self, owner: str) -> TaskOptions:
        """Return the options.

        Args:
            owner: The task or handler, for error texts.

        Raises:
            UsageError: An option is not valid.
        """
        try:
            return TaskOptions(retries=Retries.of(*self._retry), **self._options)
        except UsageError as error:
            error.args = (f"{owner}: {error}",)
            raise


class _Decorator(Generic[State]):
    """`@tasks.task(...)`, typed for functions with and without a `Context`."""

    __slots__ = ("_hooks", "_name", "_on_failure", "_options", "_tasks")

    def __init__(
        self,
        tasks: Tasks[State],
        name: str | None,
        options: _GivenOptions,
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
        options = self._options.check(f"task {name!r}")
        task: Task[..., Any] = Task(self._tasks, function, name, options, self._hooks)
        if self._on_failure is not None:
            check_holds(self._tasks._url, name)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            task.on_failure = self._on_failure
        self._tasks._register(task)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return task


def _check_lifespan(lifespan: Any) -> Any:
    if lifespan is not None and not callable(lifespan):
        raise UsageError(f"lifespan must be a function that takes the app (got {shown(lifespan)})")
    if inspect.isasyncgenfunction(lifespan) or inspect.isgeneratorfunction(lifespan):
        raise UsageError(
            f"lifespan must return a context manager: write @asynccontextmanager above {handler_name(lifespan)}"
        )
    return lifespan


def _check_imports(imports: Any) -> tuple[str, ...]:
    names: tuple[Any, ...] = (imports,) if isinstance(imports, (str, bytes)) else tuple(imports)
    if isinstance(imports, (str, bytes)) or not all(isinstance(name, str) and _is_module(name) for name in names):
        raise UsageError(f'imports must be a list of names of modules, such as ["shop.tasks"] (got {shown(imports)})')
    return names


def _is_module(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _check(function: Any, decorator: str) -> None:
    if isinstance(function, Task):
        raise UsageError(f"{decorator}: {function.name!r} is already a task: decorate a function once")
    check_handler(function, decorator)
