"""A handler's own process: takes one message at a time from its parent's socket, runs the handler, answers with the outcome.

Both directions carry a length (4 bytes, big endian) and a msgpack map: data only, no pickled objects. The process ends when the
socket does, and is killed by the kernel (Linux) when its parent dies, so that no handler works on for a worker that is gone.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import msgspec

from qworker import log_events as events
from qworker import logs
from qworker.context import Context
from qworker.decision import Fail, Retry, outcome_of
from qworker.definition.callables import unrun
from qworker.envelope import Envelope, open_envelope
from qworker.errors import UsageError
from qworker.failure_text import error_type, failure_text
from qworker.kit.linux import set_parent_death_signal
from qworker.message import Message
from qworker.signature import Signature
from qworker.task import Handler

__all__ = ["Reply", "Request", "Setup", "main"]

_LENGTH = 4


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told once."""

    # The script that its parent runs, for handlers that live there.
    main: str | None
    # `logs.configure`'s arguments, where the parent has called it.
    logging: tuple[bool | None, str] | None
    parent: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One message to run."""

    module: str
    qualname: str
    # The task's or raw handler's name.
    name: str
    # Whether the handler takes the message itself, not an envelope's arguments.
    raw: bool
    message: Message
    # The message's, which may come from names of files: no text is sent that has no UTF-8.
    argv: tuple[bytes, ...] = ()
    token: int
    # Unix seconds.
    deadline: float | None
    max_tries: int


class _Running:
    """What log lines say of the message."""

    is_over = False

    def __init__(self, request: Request) -> None:
        self._request = request

    def fields(self) -> dict[str, Any]:
        request = self._request
        message = request.message
        return {
            events.MESSAGE_ID: message.id,
            events.TASK: request.name,
            events.QUEUE: message.queue,
            events.TRIES: message.tries,
            events.TOKEN: request.token,
        }


class _Lease:
    """The lease of the message that runs; the parent knows of it."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._over = False

    def is_lost(self) -> bool:
        """Ask the parent. From any of the handler's threads."""
        with self._lock:
            if self._over:
                return True
            try:
                _send(self._parent, Reply(how="check_lease"))
                answer = _receive(self._parent)
            except OSError:
                return True
            return answer is None or msgspec.msgpack.decode(answer, type=bool)

    def end(self) -> None:
        """Nothing is asked of the parent any more: it waits for the next message."""
        with self._lock:
            self._over = True


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`begun` once the handler is imported, `check_lease` each time that it asks, and then how it ended."""

    how: Literal["begun", "check_lease", "returned", "retry", "fail", "raised"]
    reason: str = ""
    delay: float | None = None
    error_type: str = ""


def main(descriptor: int) -> None:
    """Serve one parent; returns when it is gone."""
    # A Ctrl-C or a service manager's SIGTERM reaches the whole group; it is the parent that decides what it means here.
    # Functions, not SIG_IGN: programs that a handler starts shall not inherit it.
    signal.signal(signal.SIGINT, _leave_to_the_parent)
    signal.signal(signal.SIGTERM, _leave_to_the_parent)
    with socket.socket(fileno=descriptor) as parent:
        first = _receive(parent)
        if first is None:
            return
        setup = msgspec.msgpack.decode(first, type=Setup)
        _die_with_the_parent(setup.parent)
        if setup.logging is not None:
            logs.configure(*setup.logging)
        handlers = _Handlers(setup.main, setup.logging)
        while (data := _receive(parent)) is not None:
            _send(parent, _run(handlers, msgspec.msgpack.decode(data, type=Request), parent))


def _send(parent: socket.socket, reply: Reply) -> None:
    encoded = msgspec.msgpack.encode(reply)
    parent.sendall(len(encoded).to_bytes(_LENGTH, "big") + encoded)


def _leave_to_the_parent(_signal: int, _frame: Any) -> None:
    pass


def _die_with_the_parent(parent: int) -> None:
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        # It died before the kernel was told.
        raise SystemExit(1)


def _receive(parent: socket.socket) -> bytes | None:
    head = _exactly(parent, _LENGTH)
    return None if head is None else _exactly(parent, int.from_bytes(head, "big"))


def _exactly(parent: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = parent.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _run(handlers: _Handlers, request: Request, parent: socket.socket) -> Reply:
    logs.RUNNING.set(_Running(request))
    lease = _Lease(parent)
    try:
        function, signature = handlers.found(request.module, request.qualname)
        _send(parent, Reply(how="begun"))
        return _outcome(function, signature, request, lease)
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its message's outcome
        return Reply(how="raised", reason=failure_text(error), error_type=error_type(error))
    finally:
        lease.end()


def _outcome(function: Callable[..., Any], signature: Signature, request: Request, lease: _Lease) -> Reply:
    try:
        _call(function, signature, request, lease)
    except (Retry, Fail) as error:
        reason, delay = outcome_of(error)
        return Reply(how="retry" if isinstance(error, Retry) else "fail", reason=reason, delay=delay)
    return Reply(how="returned")


def _call(function: Callable[..., Any], signature: Signature, request: Request, lease: _Lease) -> None:
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
    if signature.takes_injected:
        args.insert(
            0,
            Context(
                message=message,
                task=request.name,
                token=request.token,
                deadline=request.deadline,
                headers=headers,
                max_tries=request.max_tries,
                lease_lost=lease.is_lost,
            ),
        )
    result = function(*args, **kwargs)
    problem = unrun(result)
    if problem is not None:
        raise problem


class _Handlers:
    """Functions by module and name; a parent's script is run once, under another name than `__main__`."""

    def __init__(self, main_path: str | None, logging: tuple[bool | None, str] | None) -> None:
        self._main_path = main_path
        self._logging = logging
        self._main: SimpleNamespace | None = None
        self._known: dict[tuple[str, str], tuple[Callable[..., Any], Signature]] = {}

    def found(self, module: str, qualname: str) -> tuple[Callable[..., Any], Signature]:
        """The function of that name, and what it takes."""
        known = self._known.get((module, qualname))
        if known is None:
            known = self._known[module, qualname] = self._find(module, qualname)
            if self._logging is not None:
                logs.show_standard_logging(*self._logging)
        return known

    def _find(self, module: str, qualname: str) -> tuple[Callable[..., Any], Signature]:
        target: Any = self._script() if module == "__main__" else importlib.import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
        if isinstance(target, Handler):
            return target.function, target.signature
        return target, Signature(target, Context)

    def _script(self) -> SimpleNamespace:
        if self._main is None:
            if self._main_path is None:
                raise UsageError("process=True needs a handler in an importable module: move it to a module")
            self._main = SimpleNamespace(**runpy.run_path(self._main_path, run_name="__qworker_child__"))
        return self._main
