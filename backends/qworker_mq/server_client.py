"""Requests to one server, whose answers are checked. Both backends for servers share this code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio
import msgspec

from qworker import errors
from qworker.errors import (
    AlreadyEnqueued,
    BackendError,
    BackendUnavailable,
    PermissionDenied,
    QueueNotFound,
    UsageError,
)
from qworker.message import Lease, SettleAction, Settlement
from qworker.url import BackendURL
from qworker_mq.client import Answer, BlockingClient, Client, ServerAddress

__all__ = ["ANSWER_TIMEOUT", "ServerClient", "decode", "keep_or_release"]

T = TypeVar("T")

# Seconds that an answer may take, in addition to the time that the server was asked to wait.
ANSWER_TIMEOUT = 30.0
_JSON = {"content-type": "application/json"}


class ServerClient:
    """A client that sends requests to one server, and raises the errors in its answers.

    Args:
        url: URL of the server. QWORKER_HTTP_TOKEN has the token if the URL has none.

    Attributes:
        url: The URL with its token masked.
    """

    def __init__(self, url: BackendURL) -> None:
        self.url = url.masked
        address = ServerAddress.parse(url, os.environ.get("QWORKER_HTTP_TOKEN"))
        self._client = Client(address)
        self._blocking = BlockingClient(address)

    async def get_unchecked(self, target: str) -> Answer:
        """Get any answer from the server."""
        return await self._client.request("GET", target, timeout=ANSWER_TIMEOUT)

    async def send(self, method: str, target: str, body: bytes = b"") -> Answer:
        """Send a request of mq's own protocol.

        Raises:
            BackendError: See `check`.
        """
        return self.check(await self._client.request(method, target, body=body, timeout=ANSWER_TIMEOUT))

    async def ask(
        self, method: str, target: str, value: Any = None, *, queue: str = "", timeout: float = ANSWER_TIMEOUT
    ) -> Answer:
        """Send a request with a JSON value, or with no body.

        Raises:
            BackendError: See `check`.
        """
        body = b"" if value is None else msgspec.json.encode(value)
        answer = await self._client.request(method, target, headers=_JSON if body else None, body=body, timeout=timeout)
        return self.check(answer, queue)

    def ask_blocking(self, method: str, target: str, value: Any, *, timeout: float) -> Answer:
        """Do the same as `ask` from any thread."""
        body = msgspec.json.encode(value)
        return self.check(self._blocking.request(method, target, headers=_JSON, body=body, timeout=timeout))

    def check(self, answer: Answer, queue: str = "") -> Answer:
        """Return the answer if it is not an error.

        Args:
            answer: The answer.
            queue: The queue of the request, for the error.

        Raises:
            BackendError: The error that the server's backend raised.
            UsageError: The error that the server's backend raised.
            AlreadyEnqueued: Another message has the unique key.
        """
        text = answer.body.decode(errors="replace")[:500] or f"status {answer.status}"
        name = answer.headers.get("x-qworker-error", "")
        if name == "AlreadyEnqueued":
            raise AlreadyEnqueued(text, answer.headers.get("x-message-id", ""))
        if answer.status < 400 or answer.status == 409:
            return answer
        if name in {"QueueNotFound", "StoreNotFound"}:
            raise QueueNotFound(queue)
        if answer.status in {401, 403}:
            raise PermissionDenied(f"{self.url} refuses this client: set its token in QWORKER_HTTP_TOKEN")
        _raise_by_name(name, text)
        raise BackendUnavailable(f"{self.url}: {text}")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        self._blocking.close()


def decode(answer: Answer, kind: type[T]) -> T:
    """Decode the JSON of an answer.

    Raises:
        BackendUnavailable: It does not have the form of this kind of answer.
    """
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except ValueError as error:
        raise BackendUnavailable(f"the answer of the server is not valid: {error}") from error


async def keep_or_release(
    leasing: Coroutine[Any, Any, list[Lease]], settle: Callable[[Sequence[Settlement]], Awaitable[object]]
) -> list[Lease]:
    """Return the leases of a request. If this call is cancelled, wait for them and release them."""
    task = asyncio.ensure_future(leasing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # The server may have given leases already. Without a release they would last until they expire. A cancelled
        # scope of anyio would cancel this too, in the next turn of the loop.
        with anyio.CancelScope(shield=True):
            leases = await task
            await settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases])
        raise


def _raise_by_name(name: str, text: str) -> None:
    """Raise the error with this name, if it is an error of qworker."""
    kind: object = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(kind, BackendError | UsageError):
        raise kind(text)
