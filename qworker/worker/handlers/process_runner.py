"""Plain functions run in processes, for work that holds the interpreter's lock.

Each process has one message at a time, over its own socket. So a process that dies, or is killed because its time
is up, harms no other message, as it would in a pool with a common queue. Processes start when they are needed and are
reused.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from qworker import logs
from qworker.app import Tasks
from qworker.clock import Clock
from qworker.context import CancelReason
from qworker.decision import Fail, Retry
from qworker.errors import UsageError
from qworker.failure_text import NotBegun, ProcessDied, RemoteFailure, error_type
from qworker.jobs.handler_wait import HANDLER_WAITS, HandlerWaits
from qworker.jobs.records import AwaitedJob, Progress
from qworker.task import Handler, RawHandler
from qworker.worker.delivery import Delivery
from qworker.worker.handlers.child_main import ChildSetup, RunReply, RunRequest
from qworker.worker.handlers.parent_link import LENGTH, STOPPING, to_frame
from qworker.worker.handlers.preparation import preparation

__all__ = ["ProcessRunner", "app_place", "check_importable", "process_limit"]

# Not `-m`: the child must look for modules where its parent does.
_START = "import sys; sys.path[:] = sys.argv[2:]; from qworker.worker.handlers.{} import main; main(int(sys.argv[1]))"
# Replies of a handler that runs.
_NO_END = frozenset({"begun", "check_lease", "waiting", "resumed", "progress"})
# Seconds that processes without work get to end by themselves.
_CLOSE_PATIENCE = 2.0


def check_importable(handler: Handler) -> None:
    """Check that another process can find the handler's function.

    Raises:
        UsageError: It is defined inside another function, or in no file.
    """
    if handler.kind != "process":
        return
    qualname = getattr(handler.function, "__qualname__", "<nameless>")
    if "<" in qualname or (handler.function.__module__ == "__main__" and _main_path() is None):
        raise UsageError(
            f"task {handler.name!r}: process=True needs a function at the top level of a module: move it there"
        )
    if _has_hooks(handler) and not _is_under_its_name(handler):
        raise UsageError(
            f"task {handler.name!r}: process=True with hooks needs the task under its own name in the module"
        )


def _has_hooks(handler: Handler) -> bool:
    return handler.runner is not None and bool(handler.runner.hooks)


def _is_under_its_name(handler: Handler) -> bool:
    """Return whether a child process that looks for the function finds the task, or the function of a raw handler."""
    found: Any = sys.modules.get(handler.function.__module__)
    for part in handler.function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is (handler.function if isinstance(handler, RawHandler) else handler)


def _flags() -> list[str]:
    """Return the interpreter's flags (`-O`, `-X dev`, `-W error`), for a process that runs handlers as this one would.

    The standard library has the list for multiprocessing, but not under a public name. Without it, no flags are passed.
    """
    flags: Callable[[], list[str]] = getattr(subprocess, "_args_from_interpreter_flags", list)
    return flags()


class HandlerProcess:
    """One process and the parent's end of its socket."""

    def __init__(self, app: tuple[str, str, str | None] | None = None, *, isolated: bool = False) -> None:
        self._app = app
        start = _START.format("isolated_main" if isolated else "child_main")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *_flags(), "-c", start, str(theirs.fileno()), *sys.path],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._socket = ours
        self._set_up = False
        # One frame after another.
        self._sending = asyncio.Lock()

    async def ask(self, request: RunRequest, attempt: _Attempt, stopping: Callable[[], bool]) -> RunReply:
        """Run one message.

        Args:
            request: The message.
            attempt: Takes what the process reports while the handler runs, and answers its questions.
            stopping: Returns whether the worker stops already.

        Raises:
            OSError, EOFError: the process has died.
        """
        loop = asyncio.get_running_loop()
        if not self._set_up:
            setup = ChildSetup(
                main=_main_path(),
                logging=logs.configured(),
                parent=os.getpid(),
                app=self._app,
                prepare=preparation(),
            )
            await self._send(setup)
            self._set_up = True
        if stopping():
            await self._send(STOPPING)
        await self._send(request)
        reply = await self._reply(loop)
        while reply.how in _NO_END:
            answer = attempt.take(reply)
            if answer is not None:
                await self._send(answer)
            reply = await self._reply(loop)
        return reply

    async def _send(self, value: Any) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._socket, to_frame(value))

    async def notice_stopping(self) -> None:
        """Send the notice that the worker stops to the handler."""
        try:
            # Before the set-up, the child expects nothing else.
            if self._set_up:
                await self._send(STOPPING)
        except OSError:
            # The process has died, or was killed: whoever runs it finds that out.
            pass

    async def _reply(self, loop: asyncio.AbstractEventLoop) -> RunReply:
        size = int.from_bytes(await self._exactly(loop, LENGTH), "big")
        return msgspec.msgpack.decode(await self._exactly(loop, size), type=RunReply)

    async def _exactly(self, loop: asyncio.AbstractEventLoop, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = await loop.sock_recv(self._socket, count - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def alive(self) -> bool:
        return self._process.poll() is None

    def hang_up(self) -> None:
        """Close the socket: the process ends by itself when it has no work."""
        self._socket.close()

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()

    def death(self) -> str:
        status = self._process.returncode
        if status is None:
            return "it closed its connection"
        if status < 0:
            try:
                return f"killed by {signal.Signals(-status).name}"
            except ValueError:
                return f"killed by signal {-status}"
        return f"exit status {status}"


class _Timer:
    """The timeout of a delivery, from the start of the handler: not while it waits for a process or imports the app."""

    def __init__(self, delivery: Delivery, timeout: float | None) -> None:
        self._delivery = delivery
        self._timeout = timeout
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timeout is not None:
            self._handle = asyncio.get_running_loop().call_later(
                self._timeout, self._delivery.cancel, CancelReason.TIMEOUT
            )

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class _Attempt:
    """One run of a handler in a process, as the process reports it.

    Args:
        runner: The runner, whose place is free while the handler waits for another job.
        delivery: The delivery.
        timer: The timeout of the handler.
    """

    def __init__(self, runner: ProcessRunner, delivery: Delivery, timer: _Timer) -> None:
        self._runner = runner
        self._delivery = delivery
        self._timer = timer
        # Where the wait of the handler was reported. None: it does not wait.
        self._waits: HandlerWaits | None = None

    def take(self, reply: RunReply) -> bool | None:
        """Take what the process reports, and return the answer if it needs one."""
        if reply.how == "begun":
            self._timer.start()
        elif reply.how == "check_lease":
            return self._runner.is_lost(self._delivery)
        elif reply.job is not None:
            return self._begin_wait(reply.job)
        elif reply.how == "resumed":
            self.end_wait()
        elif reply.progress is not None:
            self._runner.report(self._delivery, reply.progress)
        return None

    def _begin_wait(self, job: AwaitedJob) -> bool:
        waits = HANDLER_WAITS.get()
        if waits is not None:
            try:
                waits.begin(self._delivery, job)
            except UsageError:
                return False
            self._waits = waits
            self._runner.free_place()
        return True

    def end_wait(self) -> None:
        """Let the handler count again, if it waits. Idempotent."""
        waits, self._waits = self._waits, None
        if waits is not None:
            self._runner.take_place_back()
            waits.end(self._delivery)


class ProcessRunner:
    """Runs handlers in processes.

    Args:
        limit: Maximum number of processes.
        clock: The clock of the leases.
        report: Takes the progress of a handler.
        app: The module of the app, its name there, and its URL. None: no other process can import it.
        isolated: Whether it runs suspects, with handlers of every kind.
    """

    def __init__(
        self,
        limit: int,
        clock: Clock,
        report: Callable[[Delivery, Progress], None],
        app: tuple[str, str, str | None] | None = None,
        *,
        isolated: bool = False,
    ) -> None:
        self.report = report
        self._clock = clock
        self._app = app
        self._isolated = isolated
        self._slots = asyncio.Semaphore(limit)
        # Handlers that continue after a wait without a place of their own. The next places that end are theirs.
        self._overdrawn = 0
        self._idle: list[HandlerProcess] = []
        self._busy: set[HandlerProcess] = set()
        self._stopping = False
        self._notices: set[asyncio.Task[None]] = set()
        # Processes that were asked to end and still run.
        self._ending: list[HandlerProcess] = []

    async def run(self, delivery: Delivery) -> BaseException | None:
        """Run a handler. Return what it raised, or None. A cancellation kills the handler's process."""
        handler = delivery.handler
        assert handler is not None
        await self._slots.acquire()
        timer = _Timer(delivery, delivery.timeout)
        attempt = _Attempt(self, delivery, timer)
        try:
            reply = await self._run(self._request(delivery, handler), attempt)
        finally:
            timer.cancel()
            attempt.end_wait()
            self.free_place()
        if isinstance(reply, BaseException):
            return reply
        delivery.result = reply.result
        return _error(reply)

    def is_lost(self, delivery: Delivery) -> bool:
        """Return whether the lease of a delivery is over."""
        return delivery.is_lost(self._clock.monotonic())

    def free_place(self) -> None:
        """Let another handler run in the place of one that has ended, or waits."""
        if self._overdrawn:
            self._overdrawn -= 1
        else:
            self._slots.release()

    def take_place_back(self) -> None:
        """Let a handler continue that has waited, at once: for a moment there is one more than the limit."""
        self._overdrawn += 1

    def notice_stopping(self) -> None:
        """Send the notice that the worker stops to the handlers that run, and to those that start later."""
        self._stopping = True
        for child in self._busy:
            self._notice(child)

    def _notice(self, child: HandlerProcess) -> None:
        notice = asyncio.get_running_loop().create_task(child.notice_stopping())
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def close(self) -> None:
        """End all processes."""
        while self._idle:
            child = self._idle.pop()
            child.hang_up()
            self._ending.append(child)
        until = self._clock.monotonic() + _CLOSE_PATIENCE
        while self._still_ending():
            if self._clock.monotonic() > until:
                for child in self._ending:
                    child.kill()
            await asyncio.sleep(0.01)

    def _request(self, delivery: Delivery, handler: Handler) -> RunRequest:
        timeout = delivery.timeout
        return RunRequest(
            module=handler.function.__module__,
            qualname=handler.function.__qualname__,
            name=handler.name,
            raw=isinstance(handler, RawHandler),
            message=msgspec.structs.replace(delivery.lease.message, argv=()),
            argv=tuple(os.fsencode(argument) for argument in delivery.lease.message.argv),
            token=delivery.lease.token,
            deadline=None if timeout is None else self._clock.time() + timeout,
            max_tries=delivery.max_tries,
            keep_result=delivery.keep_result,
            hooks=0 if handler.runner is None else len(handler.runner.hooks),
        )

    async def _run(self, request: RunRequest, attempt: _Attempt) -> RunReply | BaseException:
        try:
            child = self._free_child()
        except OSError as error:
            return NotBegun(error_type(error), f"the handler's process cannot be started: {error.strerror}")
        self._busy.add(child)
        try:
            reply = await child.ask(request, attempt, lambda: self._stopping)
        except (OSError, EOFError):
            return await self._died(child)
        except BaseException:
            self._kill(child)
            raise
        finally:
            self._busy.discard(child)
        self._idle.append(child)
        return reply

    def _free_child(self) -> HandlerProcess:
        self._still_ending()
        while self._idle:
            child = self._idle.pop()
            if child.alive():
                return child
            child.hang_up()
        return HandlerProcess(self._app, isolated=self._isolated)

    async def _died(self, child: HandlerProcess) -> BaseException:
        self._ending.append(child)
        for _ in range(100):
            if not child.alive():
                break
            await asyncio.sleep(0.01)
        how = child.death()
        child.kill()
        return ProcessDied(f"the handler's process died: {how}")

    def _kill(self, child: HandlerProcess) -> None:
        child.kill()
        self._ending.append(child)

    def _still_ending(self) -> bool:
        self._ending = [child for child in self._ending if child.alive()]
        return bool(self._ending)


def _error(reply: RunReply) -> BaseException | None:
    if reply.how == "returned":
        return None
    if reply.how == "retry":
        return Retry(reply.reason, delay=reply.delay, counts=reply.counts)
    if reply.how == "fail":
        return Fail(reply.reason)
    kind = NotBegun if reply.how == "not_begun" else RemoteFailure
    return kind(reply.error_type, reply.reason, reply.classes)


def process_limit(concurrency: int) -> int:
    """Return the number of processes for `process=True`: one per processor, or per consumer if these are fewer."""
    return min(concurrency, len(os.sched_getaffinity(0)))


def app_place(app: Tasks) -> tuple[str, str, str | None] | None:
    """Return the module of an app, its name there and its URL, or None if no other process can import it."""
    # The same module as the command line, because an import may complete the app: a factory, or `include`.
    loaded_from = app._loaded_from  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if loaded_from is not None:
        return *loaded_from, app.url
    # Copies: another thread may import something meanwhile.
    for module_name, module in sys.modules.copy().items():
        if module_name == "__main__" and _main_path() is None:
            continue
        for name, value in dict(getattr(module, "__dict__", {})).items():
            if value is app:
                return module_name, name, app.url
    return None


def _main_path() -> str | None:
    path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if path is None else os.path.abspath(path)
