"""Leasing. If the answer of a call is not read, another call releases what it has leased."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, TypeVar, cast

import structlog

from qworker import log_events as events
from qworker.errors import BackendError
from qworker.message import Lease, Message, SettleAction, Settlement, State
from qworker.names import check_existing_queue, printable
from qworker_redis.codec import decode
from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost, Redirected, Reply
from qworker_redis.own_leases import RedisLease
from qworker_redis.replica_wait import BATCH
from qworker_redis.store import UNDO_TIMEOUT, RedisStore
from qworker_redis.topology import queue_slot
from qworker_redis.wait import PAUSED, REDIRECTION_PAUSE, ReadTimeout, WakeListWaiter

__all__ = ["Damaged", "RedisLeaser", "RemoteRedisLeases", "group_by", "parse_leases"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

# The prefix of a claimant whose leases outlive its process.
_DETACHED = "detached/"
# Seconds by which the server may read this host's time too late. A script that detects that the server's clock was set
# tolerates twice this time.
_LATEST = 5.0
# Milliseconds for which an abandoned call for a lease may still reach the server.
_VOID_MS = 600_000
# Messages that are known as too large.
_REPORTED = 10_000

# A message that was leased and cannot be decoded: its id, the claim, and the reason.
Damaged = tuple[bytes, bytes, str]


def parse_leases(queue: str, reply: Reply) -> tuple[list[Lease], list[Damaged]]:
    """Return the leases of an answer of the script `lease`, and the messages that cannot be decoded."""
    token, expiry, _, ids, values, claimant = cast(
        "tuple[int, int, int, list[bytes], list[bytes | None], bytes]", reply
    )
    claim = b"%d %b" % (token, claimant)
    expires_at = expiry / 1e6
    leases: list[Lease] = []
    damaged: list[Damaged] = []
    for name, value in zip(ids, values, strict=True):
        try:
            message = decode(queue, name.decode(), value or b"")
        except BackendError as error:
            damaged.append((name, claim, str(error)))
            continue
        leases.append(RedisLease(message=message, token=token, expires_at=expires_at, claim=claim))
    return leases, damaged


class RedisLeaser:
    """Leases the messages of one backend.

    Args:
        store: The store of the backend.
        waiter: Waits for messages.
        settle: Settles leases.
        parse: Parses the answers of the script `lease` that have messages.
        remote: Whether the leases outlive this process.
    """

    def __init__(
        self,
        store: RedisStore,
        waiter: WakeListWaiter,
        settle: Callable[[Sequence[Settlement]], Coroutine[Any, Any, list[Settlement]]],
        parse: Callable[[str, Reply], tuple[list[Lease], list[Damaged]]] = parse_leases,
        *,
        remote: bool,
    ) -> None:
        self._store = store
        self._pool = store.pool
        self._waiter = waiter
        self._settle = settle
        self._parse = parse
        self._claimant = _DETACHED + store.holder if remote else store.holder
        self._requests = 0
        most = store.options.max_body
        self._max_body = "" if most is None else most
        # The messages that were reported as too large.
        self._too_large: set[bytes] = set()
        # Queues whose last lease returned nothing, and the loop's time when a message becomes due there.
        self._empty: dict[str, float] = {}
        self._log: Any = structlog.get_logger("qworker.redis")

    async def lease(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        """Lease without waiting."""
        leases: list[Lease] = []
        while len(leases) < limit:
            wanted = min(limit - len(leases), BATCH)
            try:
                found = await self._lease_batch(queue, wanted, visibility)
            except BackendError:
                if leases:
                    break
                raise
            except asyncio.CancelledError:
                await self._release(leases)
                raise
            leases += found
            if len(found) < wanted:
                break
        return leases

    async def lease_or_wait(self, queue: str, limit: int, visibility: float, timeout: float) -> list[Lease]:
        """Lease, and wait for up to `timeout` seconds if there is nothing to lease."""
        due = self._empty.pop(queue, None)
        if due is None:
            leases = await self.lease(queue, limit, visibility)
            due = self._empty.pop(queue, None)
            if leases:
                return leases
        return await self._wait_and_lease(queue, limit, visibility, timeout, due)

    async def _wait_and_lease(
        self, queue: str, limit: int, visibility: float, timeout: float, due: float | None
    ) -> list[Lease]:
        """Wait and lease in one round trip: the call for a lease is sent after the one that blocks.

        Args:
            queue: Name of the queue.
            limit: Number of messages.
            visibility: Seconds that the leases last.
            timeout: Seconds to wait.
            due: The loop's time when a message becomes due. None: it is not known.
        """
        if due is None:
            return []
        seconds = min(timeout, due - asyncio.get_running_loop().time(), self._store.options.timeout)
        arguments, claimant, void = self._request(min(limit, BATCH), visibility, seconds)
        try:
            _, reply = await self._waiter.block(queue_slot(queue), [queue], seconds, [void, *arguments])
        except (BackendError, asyncio.CancelledError) as error:
            # Whatever is wrong with the wait, the lease that was sent after it may have been carried out.
            await self._start_undo(error, self._undo(queue, claimant, void, visibility))
            if isinstance(error, Redirected):
                await asyncio.sleep(REDIRECTION_PAUSE)
            elif not isinstance(error, ReadTimeout):
                raise
            return []
        if reply is None:
            return await self.lease(queue, limit, visibility)
        if _must_repeat(reply):
            self._report_too_large(queue, cast("list[Any]", reply))
            return await self.lease(queue, limit, visibility)
        return await self._read(queue, reply)

    def drop_empty(self, queue: str) -> None:
        """Drop the result of the last lease: a wait takes wake-ups, so the queue may have messages since then."""
        self._empty.pop(queue, None)

    async def _lease_batch(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        reply = await self._send(queue, limit, visibility)
        while _must_repeat(reply):
            self._report_too_large(queue, cast("list[Any]", reply))
            reply = await self._send(queue, limit, visibility)
        return await self._read(queue, reply)

    async def _send(self, queue: str, limit: int, visibility: float) -> Reply:
        arguments, claimant, void = self._request(limit, visibility)
        sent = False

        async def attempt(connection: Connection, again: bool) -> Reply:
            nonlocal sent
            del again
            sent = True
            return await self._pool.evaluate(connection, "lease", queue, arguments, (void,))

        try:
            return await self._pool.repeat(queue_slot(queue), attempt, retry_timeout=0)
        except (ConnectionLost, asyncio.CancelledError) as error:
            if sent:
                await self._start_undo(error, self._undo(queue, claimant, void, visibility))
            raise

    def _request(self, limit: int, visibility: float, delay: float = 0.0) -> tuple[list[Argument], str, str]:
        """Return the arguments of a call, its claimant, which is unique, and its key of abandoned calls.

        Args:
            limit: Number of messages.
            visibility: Seconds that the leases last.
            delay: Seconds after which the server may read the call.
        """
        self._requests += 1
        claimant = f"{self._claimant}/{self._requests}"
        here = self._store.host_clock.reading() if delay <= _LATEST else ""
        return [limit, int(visibility * 1e6), claimant, self._max_body, here], claimant, f"void:{claimant}"

    async def _read(self, queue: str, reply: Reply) -> list[Lease]:
        """Return the leases of an answer. Damaged messages are moved to failed, so that all others still run."""
        answer = cast("list[Any]", reply)
        self._report_too_large(queue, answer)
        if not answer[3]:
            due: int = answer[2]
            if due != PAUSED:
                self._empty[queue] = math.inf if due < 0 else asyncio.get_running_loop().time() + due / 1e6
            return []
        self._empty.pop(queue, None)
        leases, damaged = self._parse(queue, answer[:6])
        self._store.own.add(queue, leases)
        try:
            for name, claim, reason in damaged:
                await self._move_to_failed(queue, name, claim, reason)
        except BackendError as error:
            # A damaged message stays leased until its lease expires. The others must run.
            if not leases:
                raise
            self._log.warning("lease_release_failed", queue=queue, error=str(error))
        except asyncio.CancelledError:
            await self._release(leases)
            raise
        return leases

    def _report_too_large(self, queue: str, answer: Sequence[Any]) -> None:
        """Report each message once that is too large. The script has delayed it, so that all others still run."""
        # The script returns fewer fields if the queue is paused or does not exist.
        names: Sequence[bytes] = answer[6] if len(answer) > 6 else ()
        if len(self._too_large) > _REPORTED:
            self._too_large.clear()
        for name in names:
            if name not in self._too_large:
                self._too_large.add(name)
                message_id = printable(name[:120].decode(errors="replace"))
                reason = f"the body is larger than max_body={self._max_body}: set a larger ?max_body= in the URL"
                self._log.error(events.MESSAGE_TOO_LARGE, queue=queue, message_id=message_id, reason=reason)

    async def _move_to_failed(self, queue: str, name: bytes, claim: bytes, reason: str) -> None:
        self._log.error("message_damaged", queue=queue, message_id=printable(name[:120].decode(errors="replace")))
        arguments: list[Argument] = [secrets.token_hex(8), "", "", 0, "p", name, claim, 0, reason.encode(), ""]
        key = f"mark:{self._store.holder}:damaged"
        await self._pool.run_script("settle", queue, arguments, (key, key))

    # -- undoing -----------------------------------------------------------------------------------------------------

    async def _start_undo(self, error: BaseException, undo: Coroutine[Any, Any, Any]) -> None:
        """Undo a call in the background. A cancelled call waits for it, but not for long."""
        task = self._store.start_task(undo)
        if isinstance(error, asyncio.CancelledError):
            await asyncio.wait([task], timeout=UNDO_TIMEOUT)

    async def _undo(self, queue: str, claimant: str, void: str, visibility: float) -> None:
        """Release the leases of a call whose answer is not read, and pass on the wake-up that it may have taken."""
        try:
            # After the visibility timeout there is nothing left to release.
            await self._pool.run_script("giveback", queue, (claimant, _VOID_MS), (void,), retry_timeout=visibility)
            await self._pool.run_script("peek", queue, (1,))
        except BackendError as error:
            self._log.warning("lease_release_failed", queue=queue, error=str(error))

    async def _release(self, leases: Sequence[Lease]) -> None:
        """Release the leases of a cancelled call."""
        if leases:
            settlements = [Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases]
            await asyncio.wait([self._store.start_task(self._settle(settlements))], timeout=UNDO_TIMEOUT)


class RemoteRedisLeases:
    """Leases that outlive the process that took them, as `qworker.backend.RemoteLeases`.

    Args:
        pool: The connections of the backend.
        decode: Makes a message from a queue, an id and the stored value.
    """

    def __init__(self, pool: ConnectionPool, decode: Callable[[str, str, Any], Message]) -> None:
        self._pool = pool
        self._decode = decode

    async def find(self, queue: str, message_id: str, token: int) -> RedisLease | None:
        """Find the lease that has this token.

        Raises:
            BackendError: The message is damaged.
        """
        row = cast("list[Any]", await self._pool.run_script("look", check_existing_queue(queue), ("id", message_id)))[
            1:
        ]
        if not row:
            return None
        _, value, state, expiry, claim, _ = cast("tuple[bytes, Reply, bytes, bytes, bytes, bytes]", tuple(row))
        if state.decode() != State.LEASED or not claim.startswith(b"%d %b" % (token, _DETACHED.encode())):
            return None
        message = self._decode(queue, message_id, value)
        return RedisLease(message=message, token=token, expires_at=float(expiry) / 1e6, claim=claim)


def _must_repeat(reply: Reply) -> bool:
    """Return whether a call for a lease has only passed over the rows of removed messages, and must be repeated."""
    _, _, due, ids, *_ = cast("list[Any]", reply)
    return not ids and due == 0


def group_by(items: Iterable[T], name: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by a name that each has, in their order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(name(item), []).append(item)
    return groups
