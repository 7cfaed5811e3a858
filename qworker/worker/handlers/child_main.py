"""The process of a handler: it takes messages from its parent's socket, one at a time, and sends back the outcomes.

`parent_link` has the form of what is sent. The process ends when the socket does. On Linux the kernel kills it when its
parent dies, so that no handler continues for a worker that is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import runpy
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import msgspec
import structlog

from qworker import log_events as events
from qworker import logs
from qworker.attempt.providers import WorkerProviders
from qworker.attempt.runner import AttemptRunner
from qworker.context import Context
from qworker.decision import Fail, Retry, outcome_of
from qworker.definition.callables import not_run_error
from qworker.envelope import EncodedResult, Envelope, encode_result, open_envelope
from qworker.errors import UsageError
from qworker.failure_text import error_type, failure_text, summary_of
from qworker.jobs.handler_wait import HANDLER_WAITS
from qworker.jobs.records import AwaitedJob, Progress
from qworker.kit.linux import set_parent_death_signal
from qworker.message import Lease, Message
from qworker.retry import class_names
from qworker.signature import Signature
from qworker.task import RAW_HANDLERS, Handler, Task
from qworker.worker.handlers.parent_link import ParentLink, receive_frame

__all__ = [
    "ChildSetup",
    "ChildWaits",
    "Found",
    "Handlers",
    "LeaseCheck",
    "RunReply",
    "RunRequest",
    "Running",
    "arguments",
    "decided",
    "log_provider",
    "main",
    "raised",
    "receive_setup",
    "returned",
]


# The name of the parent's script, which must not run as it does in the parent.
_SCRIPT = "__qworker_child__"
# Seconds between two reports of progress.
_PROGRESS_INTERVAL = 0.25


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The message that the parent sends to a new process once."""

    # The script that the parent runs, for handlers that are defined there.
    main: str | None
    # The arguments of `logs.configure`, if the parent has called it.
    logging: tuple[bool | None, str] | None
    parent: int
    # Where the app is: the module, the name in it, and the URL. None: no other process can import it.
    app: tuple[str, str, str | None] | None = None
    # The function to call before anything of the app is imported: its module, a colon and its name.
    prepare: str | None = None


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A message whose handler is to run."""

    module: str
    qualname: str
    # The name of the task or raw handler.
    name: str
    # Whether the handler takes the message itself, not an envelope's arguments.
    raw: bool
    message: Message
    # The message's, which may come from names of files: no text is sent that has no UTF-8.
    argv: tuple[bytes, ...] = ()
    token: int
    # Unix seconds.
    deadline: float | None
    max_tries: int | None
    # Whether the handler's value is wanted. The child encodes it, because its types may exist only there.
    keep_result: bool = False
    # How many hooks the worker has around the handler. A child that would miss one must not run it.
    hooks: int = 0


class Running:
    """The source of the log fields of the message."""

    is_over = False

    def __init__(self, request: RunRequest) -> None:
        self._request = request

    def fields(self) -> dict[str, Any]:
        """Return the log fields of the message."""
        request = self._request
        message = request.message
        return {
            events.MESSAGE_ID: message.id,
            events.TASK: request.name,
            events.QUEUE: message.queue,
            events.TRIES: message.tries,
            events.TOKEN: request.token,
        }


class LeaseCheck:
    """What the parent knows about the running message, as an `AttemptControl`.

    If the handler is to be stopped, the parent kills the process. So there is never a reason here.
    """

    reason = None

    def __init__(self, link: ParentLink[RunRequest]) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._over = False
        self.stopping = link.stopping

        # Progress that was not sent yet, and the timer that sends it.
        self._progress: Progress | None = None
        self._timer: threading.Timer | None = None
        self._sent_at = -_PROGRESS_INTERVAL
        self._waits = 0

    def is_lost(self) -> bool:
        """Ask the parent whether the lease is lost. From any of the handler's threads."""
        with self._lock:
            return self._over or self._link.ask(RunReply(how="check_lease")) is not False

    def report(self, progress: Progress) -> None:
        """Send the progress to the parent, at most a few times a second. From any of the handler's threads."""
        with self._lock:
            self._progress = progress
            if self._timer is None:
                pause = self._sent_at + _PROGRESS_INTERVAL - time.monotonic()
                if pause <= 0:
                    self._send_progress()
                else:
                    self._timer = threading.Timer(pause, self._on_timer)
                    self._timer.daemon = True
                    self._timer.start()

    def _on_timer(self) -> None:
        with self._lock:
            self._timer = None
            self._send_progress()

    def _send_progress(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None and not self._over:
            self._sent_at = time.monotonic()
            with contextlib.suppress(OSError):
                # The parent is gone, and this process ends soon.
                self._link.send(RunReply(how="progress", progress=progress))

    def begin_wait(self, job: AwaitedJob) -> None:
        """Report to the parent that the handler waits for this job. From any of the handler's threads.

        Raises:
            UsageError: Too many handlers of the worker wait.
        """
        with self._lock:
            question = RunReply(how="waiting", job=job)
            if not self._over and self._waits == 0 and self._link.ask(question) is False:
                raise UsageError(
                    "too many handlers of this worker wait for other jobs: use a workflow, or raise --concurrency"
                )
            self._waits += 1

    def end_wait(self) -> None:
        """Report to the parent that the handler continues."""
        with self._lock:
            self._waits -= 1
            if not self._over and self._waits == 0:
                with contextlib.suppress(OSError):
                    self._link.send(RunReply(how="resumed"))

    def end(self) -> None:
        """Send the parent nothing more, because it waits for the next message."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._send_progress()
            self._over = True


class ChildWaits:
    """Passes the waits of the running handler on to the parent."""

    def __init__(self, lease: LeaseCheck) -> None:
        self._lease = lease

    def begin(self, _running: logs.Running, job: AwaitedJob) -> None:
        """Report that the handler waits. See `HandlerWaits`."""
        self._lease.begin_wait(job)

    def end(self, _running: logs.Running) -> None:
        """Report that the handler continues."""
        self._lease.end_wait()


class RunReply(msgspec.Struct, frozen=True, kw_only=True):
    """`begun` when the handler is imported, what happens while it runs, and then how it ended.

    While it runs: `check_lease` and `waiting` (for another job) need an answer. `resumed` and `progress` do not.

    `not_begun` is the end of an isolated handler that was not called: the app could not be imported or started.
    """

    how: Literal[
        "begun", "check_lease", "waiting", "resumed", "progress", "returned", "retry", "fail", "raised", "not_begun"
    ]
    reason: str = ""
    delay: float | None = None
    counts: bool = True
    error_type: str = ""
    # The names of the classes of an error that was raised: its policy may belong to one of them.
    classes: Sequence[str] = ()
    result: EncodedResult | None = None
    progress: Progress | None = None
    # The job that the handler waits for.
    job: AwaitedJob | None = None


def main(descriptor: int) -> None:
    """Serve one parent. Return when it is gone."""
    with socket.socket(fileno=descriptor) as parent:
        setup = receive_setup(parent)
        if setup is None:
            return
        handlers = Handlers(setup)
        providers = WorkerProviders(log_provider)
        link = ParentLink(parent, RunRequest)
        try:
            while (request := link.next_request()) is not None:
                link.send(_run(handlers, providers, request, link))
        finally:
            providers.close()


def log_provider(name: str, error: BaseException) -> None:
    """Log the error of a provider that was closed."""
    fields = {events.ERROR_TYPE: error_type(error), events.ERROR: summary_of(error)}
    structlog.get_logger("qworker").error(events.PROVIDER_FAILED, **{events.PROVIDER: name}, **fields)


def receive_setup(parent: socket.socket) -> ChildSetup | None:
    """Prepare this process, and return what its parent sent. None: the parent is gone."""
    # Ctrl-C or a service manager's SIGTERM reaches the whole group, and the parent decides what it means here.
    # Functions, not SIG_IGN: programs that a handler starts must not inherit it.
    signal.signal(signal.SIGINT, _ignore_terminal_signals)
    signal.signal(signal.SIGTERM, _ignore_terminal_signals)
    first = receive_frame(parent)
    if first is None:
        return None
    setup = msgspec.msgpack.decode(first, type=ChildSetup)
    _die_with_the_parent(setup.parent)
    if setup.logging is not None:
        logs.configure(*setup.logging)
    return setup


def _ignore_terminal_signals(_signal: int, _frame: Any) -> None:
    pass


def _die_with_the_parent(parent: int) -> None:
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        # The parent died before the kernel was asked for the signal.
        raise SystemExit(1)


def _run(handlers: Handlers, providers: WorkerProviders, request: RunRequest, link: ParentLink[RunRequest]) -> RunReply:
    logs.RUNNING.set(Running(request))
    lease = LeaseCheck(link)
    HANDLER_WAITS.set(ChildWaits(lease))
    try:
        found = handlers.found(request)
        link.send(RunReply(how="begun"))
        return _outcome(found, providers, request, lease)
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
        return raised(error)
    finally:
        lease.end()


def _outcome(found: Found, providers: WorkerProviders, request: RunRequest, lease: LeaseCheck) -> RunReply:
    try:
        context, args, kwargs = arguments(found.signature, request, lease)
        if found.runner is not None:
            return returned(found.runner.run_sync(context, args, kwargs, providers), request)
        if found.signature.takes_injected:
            args.insert(0, context)
        return returned(found.function(*args, **kwargs), request)
    except (Retry, Fail) as error:
        return decided(error)


def returned(value: Any, request: RunRequest) -> RunReply:
    """Return the reply for the value of a handler.

    Raises:
        TypeError: The value is a coroutine or generator, so the handler has not run.
    """
    problem = not_run_error(value)
    if problem is not None:
        raise problem
    return RunReply(how="returned", result=encode_result(value) if request.keep_result else None)


def decided(error: Retry | Fail) -> RunReply:
    """Return the reply for a handler that decided its outcome."""
    reason, delay, counts = outcome_of(error)
    return RunReply(how="retry" if isinstance(error, Retry) else "fail", reason=reason, delay=delay, counts=counts)


def raised(error: BaseException) -> RunReply:
    """Return the reply for a handler that raised an error."""
    # The parent knows the classes of its own script by another module.
    names = [name.replace(f"{_SCRIPT}.", "__main__.", 1) for name in class_names(error)]
    return RunReply(how="raised", reason=failure_text(error), error_type=error_type(error), classes=names)


def arguments(
    signature: Signature, request: RunRequest, lease: LeaseCheck, state: Any = None
) -> tuple[Context, list[Any], dict[str, Any]]:
    """Return the context of a handler and its arguments.

    Args:
        signature: The handler's signature.
        request: The message.
        lease: What the parent knows about it.
        state: The value that the app's lifespan yielded.
    """
    message = msgspec.structs.replace(request.message, argv=tuple(map(os.fsdecode, request.argv)))
    args: list[Any] = [message]
    kwargs: dict[str, Any] = {}
    headers: Mapping[str, str] = {}
    if not request.raw:
        envelope = open_envelope(message.body)
        if not isinstance(envelope, Envelope):
            raise UsageError(f"the message {message.id} is not an envelope")
        headers = envelope.headers
        args, kwargs = signature.convert(envelope.args, envelope.kwargs)
    context = Context(
        lease=Lease(message=message, token=request.token, expires_at=0.0),
        task=request.name,
        deadline=request.deadline,
        headers=headers,
        state=state,
        max_tries=request.max_tries,
        control=lease,
    )
    return context, args, kwargs


class Found(NamedTuple):
    """A handler that was found by its name."""

    function: Callable[..., Any]
    signature: Signature
    # None: nothing runs around it.
    runner: AttemptRunner | None


class Handlers:
    """The app, and functions by module and name. The parent's script is run once, under another name than `__main__`.

    Args:
        setup: What the parent has sent.
    """

    def __init__(self, setup: ChildSetup) -> None:
        self._main_path = setup.main
        self._logging = setup.logging
        self._place = setup.app
        # None: there is none, or it has returned.
        self._preparation = setup.prepare
        self._app: Any = None
        # The apps that have the parent's URL although their own place cannot be imported here.
        self._with_url: list[Any] = []
        self._main: SimpleNamespace | None = None
        self._known: dict[tuple[str, str, str | None], Found] = {}

    def found(self, request: RunRequest) -> Found:
        """Return the handler of a message.

        Raises:
            UsageError: The worker has hooks around it, and here it has none.
        """
        key = request.module, request.qualname, request.message.queue if request.raw else None
        known = self._known.get(key)
        if known is None:
            self._prepare()
            known = self._known[key] = self._find(*key)
            if self._logging is not None:
                logs.show_standard_logging(*self._logging)
        if request.hooks > (0 if known.runner is None else len(known.runner.hooks)):
            raise UsageError(
                f"task {request.name!r} lacks hooks when its module is imported again: register them on import"
            )
        return known

    def module(self, name: str) -> Any:
        """Import a module, or the parent's script."""
        return self._script() if name == "__main__" else importlib.import_module(name)

    def app(self) -> Any:
        """Import the app as the parent did, with the modules that it names, and give it the parent's URL."""
        if self._app is None and self._place is not None:
            self._prepare()
            module, name, url = self._place
            app: Any = self.module(module)
            for part in name.split("."):
                app = getattr(app, part)
            # It calls the store of the parent, also if a factory has set the URL there, or the command line has.
            app._replace_url(url)  # noqa: SLF001
            app._import_modules(importlib.import_module)  # noqa: SLF001
            self._app = app
        return self._app

    def _prepare(self) -> None:
        if self._preparation is not None:
            module, _, function = self._preparation.partition(":")
            getattr(importlib.import_module(module), function)()
            self._preparation = None

    def _use_url(self, app: Any, url: str | None) -> None:
        """Give the parent's URL to an app whose own place cannot be imported here, once."""
        if not any(one is app for one in self._with_url):
            self._with_url.append(app)
            app._replace_url(url)  # noqa: SLF001

    def _find(self, module: str, qualname: str, raw_queue: str | None) -> Found:
        if self._place is not None and _is_importable(self._place[0], module):
            self.app()
        target: Any = self.module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
        if raw_queue is not None:
            target = getattr(target, RAW_HANDLERS, {}).get(raw_queue, target)
        if isinstance(target, Handler):
            if isinstance(target, Task) and self._app is None and self._place is not None:
                self._use_url(target.app, self._place[2])
            return Found(target.function, target.signature, target.runner)
        signature = Signature(target, Context)
        runner = AttemptRunner(target, signature.name, "process", signature.takes_injected, provided=signature.provided)
        return Found(target, signature, runner if runner.is_needed else None)

    def _script(self) -> SimpleNamespace:
        if self._main is None:
            if self._main_path is None:
                raise UsageError("process=True needs a handler in an importable module: move it to a module")
            self._main = SimpleNamespace(**runpy.run_path(self._main_path, run_name=_SCRIPT))
        return self._main


def _is_importable(app_module: str, module: str) -> bool:
    """Return whether the app of a handler in `module` can be imported here."""
    if app_module == "__main__":
        # A script that only starts a worker must not be run here.
        return module == app_module
    try:
        return importlib.util.find_spec(app_module) is not None
    except (ImportError, ValueError):
        # The parent has loaded it in another way than by its name.
        return False
