"""The contract over the scripts; docs/redis.md describes the keys."""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Self, cast

import structlog

from qworker.backend import RemoteLeases
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendError, BackendUnavailable
from qworker.kit.doctor_check import Check
from qworker.kit.wait import check_limit
from qworker.message import Draft, Lease, SettleAction, Settlement
from qworker.names import check_id, check_queue, new_ids
from qworker.url import BackendURL
from qworker_redis.bulk import RedisBulkStore
from qworker_redis.codec import PlainDraft, decode, encode
from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost, Redirected, Reply
from qworker_redis.extend import Renewals
from qworker_redis.history import RedisHistory
from qworker_redis.lease import DETACHED, RedisLease, RemoteRedisLeases
from qworker_redis.options import Options
from qworker_redis.parts import BulkReading
from qworker_redis.publish import Publishing
from qworker_redis.replica_wait import BATCH
from qworker_redis.scripts import NATIVE, ScriptSet
from qworker_redis.settle import Settling, grouped
from qworker_redis.topology import make_topology, queue_slot
from qworker_redis.wait import ReadTimeout, Waiting

__all__ = ["RedisBackend"]


_REAP_BATCH = 500
# For how long a call for a lease that was given up might still reach the server.
_VOID_MS = 600_000
# Seconds for which a cancelled lease waits until what it claimed is given back, and a close until that is done.
_GIVE_BACK = 1.0
_REDIRECTION_PAUSE = 0.05


class RedisBackend(BulkReading):
    """Queues in a Redis, a Redis with sentinels, or a Redis cluster.

    Args:
        options: the URL, understood.
        clock: for how much time has passed.
    """

    # What another protocol on a Redis has instead.
    scripts: ClassVar[ScriptSet] = NATIVE
    waiting: ClassVar[type[Waiting]] = Waiting

    def __init__(self, options: Options, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._options = options
        # Only for how much time has passed: what time it is the server says.
        self._clock = clock
        self._topology = make_topology(options)
        self._pool = ConnectionPool(options, self._topology, self.scripts)
        self._waiting = self.waiting(options, self._pool)
        self._renewals = Renewals(options, self._topology, self.scripts)
        self._registered = set()
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40]
        self._holder = f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
        self._claimant = self._holder if not remote_leases else DETACHED + self._holder
        self.remote_leases = self._remote_leases() if remote_leases else None
        self._requests = 0
        listed = self._registered if "publish_one" in self.scripts.names else ()
        self._publishing = Publishing(options, self._pool, self._holder, self._stored_in, listed=listed)
        self._settling = Settling(options, self._pool, self._holder)
        # Queues whose last lease gave nothing, and the loop's time when something becomes due there.
        self._empty: dict[str, float] = {}
        # The server's time at the last reap of a queue, and this process's.
        self._reaped: dict[str, tuple[str, float]] = {}
        self._chores: set[asyncio.Task[Any]] = set()
        self.history = RedisHistory(self._pool, options.history, clock=clock, command=self._command, queues=self.queues)
        # Another protocol's programs would see what is staged in its keyspace.
        self.bulk = self._bulk_store() if "stage" in self.scripts.names else None
        self._log: Any = structlog.get_logger("qworker.redis")

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`redis://[user:password@]host[:port][/db]`, `rediss:` for TLS, and `unix:`, `redis+sentinel:`, `redis+cluster:`.

        Options: `timeout`, `retry_timeout`, `min_replicas`, `keep_done`, `keep_failed`; for TLS `tls_ca`, `tls_cert`, `tls_key`, `tls_verify`; see
        docs/redis.md. All times are the server's; the clock is for telling a server whose clock was set.
        """
        return cls(Options.parse(url), clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Reach the server, and refuse one that may lose queues."""
        await self._pool.get_connection(queue_slot("queues"))

    async def aclose(self) -> None:
        """End all connections."""
        if self._chores:
            _, late = await asyncio.wait(self._chores, timeout=_GIVE_BACK)
            for task in late:
                task.cancel()
        await self.history.aclose()
        await self._pool.aclose()
        await asyncio.to_thread(self._renewals.close)

    def describe(self) -> str:
        """The URL, its password masked."""
        return self._options.shown

    @property
    def durability(self) -> str:
        """`replicated` with `?min_replicas=`; `disk` with `appendfsync always`; `process` otherwise, or when it is not known."""
        if self._options.min_replicas:
            return "replicated"
        return "process" if self._pool.server_info is None else self._pool.server_info.durability

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages; an unknown outcome is resolved by repeating, for `?retry_timeout=` seconds."""
        check_queue(queue)
        if not drafts:
            return []
        items = list(map(_item, new_ids(len(drafts)), drafts))
        return await self._publishing.publish(queue, items)

    def _bulk_store(self) -> RedisBulkStore:
        return RedisBulkStore(
            self._options, self._pool, create=self.create, stored_in=self._stored_in, sealed=self._sealed
        )

    async def _stored_in(self, queue: str, new: bool) -> None:
        """Have a queue listed that has messages now."""
        if new or queue not in self._registered:
            await self._register(queue)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Claim messages."""
        check_queue(queue)
        check_limit(limit)
        if timeout > 0:
            return await self._lease_within(queue, limit, visibility, timeout)
        leases: list[Lease] = []
        while len(leases) < limit:
            wanted = min(limit - len(leases), BATCH)
            try:
                found = await self._lease_once(queue, wanted, visibility)
            except BackendError:
                if leases:
                    break
                raise
            except asyncio.CancelledError:
                await self._return(leases)
                raise
            leases += found
            if len(found) < wanted:
                break
        return leases

    async def _lease_once(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        arguments, claimant, void = self._request(limit, visibility)
        sent = False

        async def attempt(connection: Connection, again: bool) -> Reply:
            nonlocal sent
            del again
            sent = True
            return await self._pool.evaluate(connection, "lease", queue, arguments, (void,))

        try:
            reply = await self._pool.repeat(queue_slot(queue), attempt, patience=0)
        except (ConnectionLost, asyncio.CancelledError) as error:
            if sent:
                chore = self._start(self._give_back(queue, claimant, void, visibility))
                if isinstance(error, asyncio.CancelledError):
                    await asyncio.wait([chore], timeout=_GIVE_BACK)
            raise
        return await self._leases(queue, reply)

    def _request(self, limit: int, visibility: float) -> tuple[list[Argument], str, str]:
        """Arguments of a lease; the claimant that they name, which is unlike any other; and its key of calls given up."""
        self._requests += 1
        claimant = f"{self._claimant}/{self._requests}"
        return [limit, int(visibility * 1e6), claimant], claimant, f"void:{claimant}"

    async def _leases(self, queue: str, reply: Reply) -> list[Lease]:
        """The leases of an answer."""
        token, expiry, due, ids, values, *claimants = cast(
            "tuple[int, int, int, list[bytes], list[bytes | None], bytes]", reply
        )
        if not ids:
            self._empty[queue] = math.inf if due < 0 else asyncio.get_running_loop().time() + due / 1e6
            return []
        self._empty.pop(queue, None)
        claim = b"%d %b" % (token, claimants[0])
        expires_at = expiry / 1e6
        leases: list[Lease] = []
        for name, value in zip(ids, values, strict=True):
            message_id = name.decode()
            try:
                message = decode(queue, message_id, value or b"")
            except BackendError as error:
                await self._set_aside(queue, message_id, claim, str(error))
                continue
            leases.append(RedisLease(message=message, token=token, expires_at=expires_at, claim=claim))
        return leases

    async def _set_aside(self, queue: str, message_id: str, claim: bytes, why: str) -> None:
        """Fail a message that cannot be read; all others still flow."""
        self._log.error("message_damaged", queue=queue, message_id=message_id)
        arguments: list[Argument] = [secrets.token_hex(8), "", "", 0, "p", message_id, claim, 0, why, ""]
        key = f"mark:{self._holder}:damaged"
        await self._pool.run_script("settle", queue, arguments, (key, key))

    async def _lease_within(self, queue: str, limit: int, visibility: float, timeout: float) -> list[Lease]:
        """Wait, then lease: the call for a lease is sent behind the one that waits, so that both are answered at once."""
        due = self._empty.pop(queue, None)
        if due is None:
            leases = await self.lease(queue, limit, visibility)
            due = self._empty.pop(queue, None)
            if leases or due is None:
                return leases
        seconds = min(timeout, due - asyncio.get_running_loop().time())
        return await self._lease_blocked(queue, min(limit, BATCH), visibility, min(seconds, self._options.timeout))

    async def _lease_blocked(self, queue: str, limit: int, visibility: float, seconds: float) -> list[Lease]:
        arguments, claimant, void = self._request(limit, visibility)
        try:
            _, reply = await self._waiting.blocked(queue_slot(queue), [queue], seconds, [void, *arguments])
        except Redirected:
            await asyncio.sleep(_REDIRECTION_PAUSE)
            return []
        except ReadTimeout:
            self._start(self._give_back(queue, claimant, void, visibility))
            return []
        except (ConnectionLost, asyncio.CancelledError) as error:
            chore = self._start(self._give_back(queue, claimant, void, visibility))
            if isinstance(error, asyncio.CancelledError):
                await asyncio.wait([chore], timeout=_GIVE_BACK)
            raise
        if reply is None:
            return await self.lease(queue, limit, visibility)
        return await self._leases(queue, reply)

    async def _give_back(self, queue: str, claimant: str, void: str, visibility: float) -> None:
        """Undo a call for a lease whose answer nobody reads, and pass on the wake-up that it may have taken."""
        try:
            # Once the visibility has passed there is nothing left to give back.
            await self._pool.run_script("giveback", queue, (claimant, _VOID_MS), (void,), patience=visibility)
            await self._pool.run_script("peek", queue, (1,))
        except BackendError as error:
            self._log.warning("lease_release_failed", queue=queue, error=str(error))

    async def _return(self, leases: Sequence[Lease]) -> None:
        """Release what a cancelled call has leased."""
        if leases:
            chore = self._start(self.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in leases]))
            await asyncio.wait([chore], timeout=_GIVE_BACK)

    def _start(self, chore: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.warning("redis_background_task_failed", error=str(task.exception()))

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a wake-up, or the moment at which a message becomes due."""
        for queue in queues:
            check_queue(queue)
            # This takes wake-ups, so that an empty lease of before proves nothing.
            self._empty.pop(queue, None)
        try:
            await self._waiting.wait(queues, timeout)
        except asyncio.CancelledError:
            for queue in queues:
                self._start(self._wake_another(queue))
            raise

    async def _wake_another(self, queue: str) -> None:
        """Wake another in place of this one."""
        try:
            await self._pool.run_script("peek", queue, (1,), patience=0)
        except BackendUnavailable:
            # Every reap does it too.
            return

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases."""
        lost: list[Lease] = []
        for queue, ours in grouped(leases, lambda lease: lease.message.queue).items():
            lost += self._renewals.extend(queue, cast("list[RedisLease]", ours), visibility)
        return lost

    def _remote_leases(self) -> RemoteLeases:
        return RemoteRedisLeases(self._pool, decode)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases; one whose answer was lost may be repeated."""
        return await self._settling.settle(settlements)

    async def reap(self, queue: str) -> int:
        """Return what has expired, and what is due; remove what has been kept for long enough."""
        check_queue(queue)
        failed, done = self._options.keep_failed, self._options.keep_done
        limits = (_us(failed.age), _us(done.age)), (_number(failed.count), _number(done.count))
        total, more = 0, 1
        while more:
            before, at = self._reaped.get(queue, ("", 0.0))
            elapsed = int((self._clock.monotonic() - at) * 1e6)
            reply = await self._pool.run_script("reap", queue, (_REAP_BATCH, *limits[0], before, elapsed, *limits[1]))
            count, more, now = cast("tuple[int, int, int]", reply)
            self._reaped[queue] = (str(now) if now else "", self._clock.monotonic())
            total += count
        return total

    # -- besides the contract (qworker/backend/offers.py) ----------------------------------------------------------------------

    @classmethod
    async def doctor(cls, url: BackendURL) -> list[Check]:
        """Examine the server."""
        from qworker_redis.doctor import check_server

        return await check_server(url)


def _item(fresh: str, draft: Draft) -> PlainDraft:
    return encode(fresh if draft.id is None else check_id(draft.id), draft)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else str(int(seconds * 1e6))


def _number(count: int | None) -> str:
    return "" if count is None else str(count)
