"""The methods of jsonrpcd: a request's bytes in, a reply's bytes out. This module does not use HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from qworker.errors import BackendError, QworkerError
from qworker.kit.opening import open_directory
from qworker_fsq.environment import Constants
from qworker_fsq.layout import require_queue
from qworker_fsq.options import check_host
from qworker_fsq.requeue_item import check_item, requeue_item

__all__ = ["RpcMethods"]

_PARSE, _INVALID, _UNKNOWN, _PARAMETERS, _SERVER = -32700, -32600, -32601, -32602, -32603
_API_VERSION = "1.0"
_HELP = {
    "enqueue": "enqueue(fsq_id, trg_queue, data): store an item that another host has pushed; its id.",
    "trigger_pull": "trigger_pull(queue, ignore_listener=False, trigger=FSQ_TRIGGER): write a byte to the trigger.",
    "is_down": "is_down(queue, host=None): whether the queue, or the host's sub-queue, is down.",
    "api_version": "api_version(): the version of these methods.",
    "system.listMethods": "system.listMethods(): the names of all methods.",
    "system.methodHelp": "system.methodHelp(name): what a method does.",
    "system.methodSignature": "system.methodSignature(name): not supported.",
}


class RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class RpcMethods:
    """The methods of one root. They are safe to call from several threads.

    Args:
        directory: The root.
        constants: The standard's constants.

    Raises:
        OSError: The root cannot be opened.
    """

    def __init__(self, directory: str, constants: Constants) -> None:
        self._root = open_directory(directory)
        self._constants = constants
        self._methods: Mapping[str, Callable[..., Any]] = {
            "enqueue": self._enqueue,
            "trigger_pull": self._trigger_pull,
            "is_down": self._is_down,
            "api_version": lambda: _API_VERSION,
            "system.listMethods": lambda: sorted(_HELP),
            "system.methodHelp": _help,
            "system.methodSignature": _signature,
        }

    def answer(self, body: bytes) -> bytes:
        """Return the reply to a request or to a batch of them; empty for notifications."""
        try:
            request: object = msgspec.json.decode(body)
        except (ValueError, RecursionError) as error:
            return msgspec.json.encode(_failure(None, RpcError(_PARSE, f"Request invalid: {error}"), modern=True))
        if not isinstance(request, list):
            reply = self._answer_one(request)
            return b"" if reply is None else msgspec.json.encode(reply)
        replies = [self._answer_one(one) for one in cast("list[object]", request) or [None]]
        kept = [reply for reply in replies if reply is not None]
        return msgspec.json.encode(kept) if kept else b""

    def _answer_one(self, request: object) -> dict[str, Any] | None:
        if not isinstance(request, dict):
            return _failure(None, RpcError(_INVALID, "Request must be an object"), modern=True)
        given = cast("dict[str, Any]", request)
        modern, called = "jsonrpc" in given, given.get("id")
        try:
            result = self._call(given.get("method"), given.get("params", []))
        except RpcError as fault:
            return _failure(called, fault, modern=modern)
        except (QworkerError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return _failure(called, RpcError(_SERVER, f"Server error: {text}"), modern=modern)
        if called is None:
            return None
        if modern:
            return {"jsonrpc": "2.0", "id": called, "result": result}
        return {"id": called, "result": result, "error": None}

    def _call(self, method: object, params: object) -> Any:
        if not isinstance(method, str) or not isinstance(params, list | dict):
            raise RpcError(_INVALID, "Invalid request parameters or method.")
        function = self._methods.get(method)
        if function is None:
            raise RpcError(_UNKNOWN, f"Method {method[:80]} not supported.")
        try:
            if isinstance(params, dict):
                return function(**cast("dict[str, Any]", params))
            return function(*cast("Sequence[Any]", params))
        except TypeError as error:
            raise RpcError(_PARAMETERS, f"Invalid parameters: {_HELP[method]}") from error

    # -- the methods -------------------------------------------------------------------------------------------------

    def _enqueue(self, fsq_id: object, trg_queue: object, data: object) -> str:
        if not (isinstance(fsq_id, str) and isinstance(trg_queue, str) and isinstance(data, str)):
            raise RpcError(_PARAMETERS, "Invalid parameters: all are text")
        charset = self._constants.charset
        try:
            name = fsq_id.encode(charset).decode(errors="surrogateescape")
            body = data.encode(charset)
        except UnicodeEncodeError as error:
            raise RpcError(_PARAMETERS, f"Invalid parameters: cannot encode with charset {charset}") from error
        files = require_queue(self._root, trg_queue, self._constants)
        try:
            requeue_item(files, check_item(name, self._constants), body)
        finally:
            files.close()
        return fsq_id

    def _trigger_pull(self, queue: str, ignore_listener: bool = False, trigger: str | None = None) -> None:
        constants = self._constants
        trigger = constants.trigger if trigger is None else trigger
        if trigger not in {constants.trigger, constants.hosts_trigger}:
            raise RpcError(_PARAMETERS, "Invalid parameters: no such trigger")
        files = require_queue(self._root, queue, constants)
        try:
            if not files.pull_trigger(trigger) and not ignore_listener:
                raise BackendError(f"No listener for: {queue}/{trigger}")
        finally:
            files.close()

    def _is_down(self, queue: str, host: str | None = None) -> bool:
        files = require_queue(self._root, queue, self._constants, None if host is None else check_host(host))
        try:
            return files.is_down
        finally:
            files.close()


def _help(name: object) -> str:
    return _HELP.get(str(name), "")


def _signature(_name: object) -> str:
    return "signatures not supported"


def _failure(called: object, fault: RpcError, *, modern: bool) -> dict[str, Any]:
    error = {"code": fault.code, "message": str(fault)}
    if modern:
        return {"jsonrpc": "2.0", "id": called, "error": error}
    return {"id": called, "result": None, "error": error}
