"""`mq+http://[:TOKEN@]host[:port]` and `mq+https:`: the queues of a server, such as `qworker serve`.

The token may also come from QWORKER_HTTP_TOKEN. A server of another make, which has mq's endpoints and nothing else, is reached with
`?standard_only=1` (see `standard_server`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast
from urllib.parse import urlencode

import msgspec

from qworker import errors
from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import (
    BackendError,
    BackendUnavailable,
    InvalidURL,
    PermissionDenied,
    PublishUncertain,
    QueueNotFound,
)
from qworker.kit.parts import WHOLE, bad_part
from qworker.kit.wait import wait_for_ready
from qworker.message import (
    Draft,
    Lease,
    Message,
    Query,
    QueueStats,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_mq.client import Address, Answer, BlockingClient, Client
from qworker_mq.remote_history import HttpHistory

__all__ = ["MqHttpBackend"]

T = TypeVar("T")

# Seconds that any answer may take, over what it was asked to wait.
_PATIENCE = 30.0
_LONGEST_WAIT = 20.0
# An extension must fail while there is time left to cancel the handler.
_EXTEND = 5.0
# Bytes of bodies in one request; base64 makes them a third longer.
_BATCH = 4 << 20
# Messages that one answer holds: by their ids, and in a state.
_FOUND = 100
_PAGE = 1000
_JSON = {"content-type": "application/json"}
_ACTIONS = {
    SettleAction.ACK: "ack",
    SettleAction.FAIL_TMP: "retry",
    SettleAction.FAIL_PERM: "fail",
    SettleAction.RELEASE: "release",
}


class _Given(msgspec.Struct):
    message: Message
    token: int
    expires_at: float


class _About(msgspec.Struct):
    durability: str
    deviations: dict[str, str]
    history: bool = False


class _Extended(msgspec.Struct):
    lost: list[int]
    expires_at: list[float]


class _RemoteLeases:
    """Leases of the server, which checks the token when they are extended or settled."""

    def __init__(self, find: Callable[[str, Sequence[str]], Awaitable[list[StoredMessage]]], clock: Clock) -> None:
        self._find = find
        self._clock = clock

    async def find(self, queue: str, message_id: str, token: int) -> Lease | None:
        """Find the lease, if the message is leased."""
        found = next(iter(await self._find(queue, [message_id])), None)
        if found is None or found.state is not State.LEASED:
            return None
        return Lease(message=found.message, token=token, expires_at=found.expires_at or self._clock.time())


class MqHttpBackend(Backend):
    """The queues of a qworker server: what they promise is what its backend promises."""

    deviations: ClassVar[Mapping[str, str]] = {"keep_done": "the URL that the server runs with says what is kept"}

    def __init__(self, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._url = url
        self._clock = clock
        self.remote_leases = _RemoteLeases(self.find, clock) if remote_leases else None
        self._address = Address.of(url, os.environ.get("QWORKER_HTTP_TOKEN"))
        self._client = Client(self._address)
        self._blocking = BlockingClient(self._address)
        self._durability: str | None = None
        # Until it is opened nobody knows whether the server has one.
        self._wants_history = url.boolean("history", True)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`mq+http://[:TOKEN@]host[:port][?standard_only=1|history=0]`."""
        url.only({"standard_only", "history"})
        if url.boolean("standard_only", False):
            from qworker_mq.standard_server import PlainMqHttpBackend

            return cast("Self", PlainMqHttpBackend(url, clock=clock))
        return cls(url, clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Ask the server what it is."""
        answer = await self._client.request("GET", "/-/about", timeout=_PATIENCE)
        if answer.status == 404:
            raise InvalidURL(f"{self.describe()} has mq's endpoints only: add ?standard_only=1")
        about = _decoded(self._checked(answer), _About)
        self._durability = about.durability
        # What its backend deviates in, this one does: an instance's own, over the class's.
        vars(self)["deviations"] = {**about.deviations, **type(self).deviations}
        if about.history and self._wants_history and not self.history.enabled:
            self.history = HttpHistory(self._ask, self.describe())

    async def aclose(self) -> None:
        """Close the connections."""
        await self.history.aclose()
        await self._client.aclose()
        self._blocking.close()

    def describe(self) -> str:
        """The URL, with the token masked."""
        return self._url.masked

    @property
    def durability(self) -> str:
        """The server's, once it was asked."""
        return self._durability or "none"

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, target: str, value: Any = None, *, queue: str = "", timeout: float = _PATIENCE
    ) -> Answer:
        body = b"" if value is None else msgspec.json.encode(value)
        answer = await self._client.request(method, target, headers=_JSON if body else None, body=body, timeout=timeout)
        return self._checked(answer, queue)

    def _checked(self, answer: Answer, queue: str = "") -> Answer:
        """The answer, if it is none of the errors.

        Raises:
            BackendError: what the server's backend raised.
            UsageError: as well.
        """
        if answer.status < 400 or answer.status == 409:
            return answer
        text = answer.body.decode(errors="replace")[:500] or f"status {answer.status}"
        name = answer.headers.get("x-qworker-error", "")
        if name in {"QueueNotFound", "StoreNotFound"}:
            raise QueueNotFound(queue)
        if answer.status in {401, 403}:
            raise PermissionDenied(f"{self.describe()} refuses this client: set its token in QWORKER_HTTP_TOKEN")
        _raise_named(name, text)
        raise BackendUnavailable(f"{self.describe()}: {text}")

    @staticmethod
    def _path(queue: str, what: str, **query: object) -> str:
        target = f"/-/{check_queue(queue)}/{what}"
        return f"{target}?{urlencode(query)}" if query else target

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        ids: list[str] = []
        target = self._path(queue, "publish")
        for batch in _batches(drafts):
            try:
                answer = await self._ask("POST", target, batch, queue=queue)
            except BackendUnavailable as error:
                raise PublishUncertain(
                    f"the message may or may not be stored: {error}: publish it again with the same id"
                ) from error
            ids += _decoded(answer, list[str])
        return ids

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Claim messages."""
        await wait_for_ready(self, queue, limit, timeout)
        asking = asyncio.ensure_future(self._lease(queue, min(limit, 1000), visibility))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The server may have given leases already: nobody else would give them back before they expire.
            leases = await asking
            await self.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases])
            raise

    async def _lease(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        answer = await self._ask(
            "POST", self._path(queue, "lease", limit=limit, visibility_timeout=visibility), queue=queue
        )
        return [
            Lease(message=given.message, token=given.token, expires_at=given.expires_at)
            for given in _decoded(answer, list[_Given])
        ]

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Have the server wait."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, min(deadline - time.monotonic(), _LONGEST_WAIT))
            started = time.monotonic()
            wish = {"queues": [check_queue(queue) for queue in queues], "timeout": left}
            await self._ask("POST", "/-/wait", wish, timeout=left + _PATIENCE)
            # Before its time: there is something. Otherwise the server's own limit ended it.
            if time.monotonic() - started < left * 0.95 or time.monotonic() >= deadline:
                return

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases, from any thread."""
        if not leases:
            return []
        value = {"leases": [_held(lease) for lease in leases], "visibility_timeout": visibility}
        answer = self._blocking.request(
            "POST", "/-/extend", headers=_JSON, body=msgspec.json.encode(value), timeout=min(_EXTEND, visibility)
        )
        extended = _decoded(self._checked(answer), _Extended)
        lost = set(extended.lost)
        for place, lease in enumerate(leases):
            if place not in lost:
                lease.expires_at = extended.expires_at[place]
        return [lease for place, lease in enumerate(leases) if place in lost]

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        if not settlements:
            return []
        value = [
            {"lease": _held(each.lease), "action": _ACTIONS[each.action], "delay": each.delay, "error": each.error}
            for each in settlements
        ]
        refused = _decoded(await self._ask("POST", "/-/settle", value), list[int])
        return [settlements[place] for place in refused]

    async def reap(self, queue: str) -> int:
        """Have the server reap, as it does every second anyway."""
        return await self._count("reap", queue)

    # -- administering -----------------------------------------------------------------------------------------------

    async def _count(self, what: str, queue: str, value: Any = None, **query: object) -> int:
        return _decoded(await self._ask("POST", self._path(queue, what, **query), value, queue=queue), int)

    async def queues(self) -> list[str]:
        """The queues."""
        return _decoded(await self._ask("GET", "/-/queues"), list[str])

    async def create(self, queue: str) -> None:
        """Make a queue."""
        await self._ask("PUT", f"/{check_queue(queue)}", queue=queue)

    async def delete(self, queue: str) -> None:
        """Remove a queue."""
        await self._ask("DELETE", f"/{check_queue(queue)}", queue=queue)

    async def stats(self, queue: str) -> QueueStats:
        """Count."""
        return _decoded(await self._ask("GET", self._path(queue, "stats"), queue=queue), QueueStats)

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages: a page is a request, and begins where the one before it has ended."""
        if query.part not in {None, WHOLE}:
            raise bad_part(query.part or "")
        left, after = query.limit, query.after
        # A lease that is extended is seen twice.
        given: set[str] = set()
        while left is None or left > 0:
            wish: dict[str, object] = {"state": query.state.word, "limit": _PAGE if left is None else min(left, _PAGE)}
            wish |= {"newest": 1} if query.newest else {}
            wish |= {} if after is None else {"after": after}
            answer = await self._ask("GET", self._path(queue, "browse", **wish), queue=queue)
            seen = _stored(answer)
            page = [stored for stored in seen if stored.message.id not in given]
            given.update([stored.message.id for stored in page] if query.state is State.LEASED else [])
            left = None if left is None else left - len(page)
            if page:
                yield page
            if "x-more" not in answer.headers:
                return
            after = seen[-1].position

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """One: everything passes through the server."""
        await self.stats(queue)
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        unique = list(dict.fromkeys(ids))
        found: list[StoredMessage] = []
        for first in range(0, max(1, len(unique)), _FOUND):
            some = {"ids": unique[first : first + _FOUND]}
            found += _stored(await self._ask("POST", self._path(queue, "find"), some, queue=queue))
        return found

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        return await self._count("requeue", queue, selection.to_json())

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        return await self._count("remove", queue, selection.to_json())

    async def pause(self, queue: str) -> None:
        """Pause."""
        await self._ask("POST", self._path(queue, "pause"), queue=queue)

    async def resume(self, queue: str) -> None:
        """Resume."""
        await self._ask("POST", self._path(queue, "resume"), queue=queue)


def _held(lease: Lease) -> dict[str, object]:
    return {"queue": lease.message.queue, "id": lease.message.id, "token": lease.token}


def _batches(drafts: Sequence[Draft]) -> Iterable[list[Draft]]:
    """Drafts in requests that a server takes."""
    batch: list[Draft] = []
    size = 0
    for draft in drafts:
        if batch and size + len(draft.body) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(draft)
        size += len(draft.body) + 200
    if batch:
        yield batch


def _decoded(answer: Answer, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except ValueError as error:
        raise BackendUnavailable(f"the answer of the server is not valid: {error}") from error


def _stored(answer: Answer) -> list[StoredMessage]:
    try:
        return [StoredMessage.from_json(each) for each in _decoded(answer, list[dict[str, Any]])]
    except (errors.UsageError, ValueError, KeyError) as error:
        raise BackendUnavailable(f"the answer of the server is not valid: {error}") from error


def _raise_named(name: str, text: str) -> None:
    """Raise the error of this name, where it is one of the tree."""
    kind: object = getattr(errors, name, None) if name in errors.__all__ else None
    if isinstance(kind, type) and issubclass(kind, BackendError | errors.UsageError):
        raise kind(text)
