"""Extending leases from any thread, on connections that the event loop does not use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import cast

from qworker.errors import BackendUnavailable
from qworker.message import Lease
from qworker_redis.blocking_connection import BlockingConnection
from qworker_redis.connection import Argument
from qworker_redis.error_replies import ConnectionLost, NoScript, Redirected, Reply
from qworker_redis.lease import RedisLease, group_by
from qworker_redis.options import Address
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["RedisLeaseExtender"]

_MOST_ATTEMPTS = 4
_BATCH = 500


class RedisLeaseExtender:
    """Extends the leases of one backend. It blocks, and any thread can use it.

    Args:
        store: The store of the backend.
    """

    def __init__(self, store: RedisStore) -> None:
        self._options = store.options
        self._topology = store.topology
        self._scripts = store.scripts
        self._lock = threading.Lock()
        self._connections: dict[Address, BlockingConnection] = {}

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases and return the lost ones.

        Raises:
            BackendUnavailable: No answer. It is unknown which leases are lost.
        """
        lost: list[Lease] = []
        for queue, ours in group_by(leases, lambda lease: lease.message.queue).items():
            lost += self._extend(queue, cast("list[RedisLease]", ours), visibility)
        return lost

    def _extend(self, queue: str, leases: Sequence[RedisLease], visibility: float) -> list[Lease]:
        lost: list[Lease] = []
        for first in range(0, len(leases), _BATCH):
            batch = leases[first : first + _BATCH]
            arguments: list[Argument] = [int(visibility * 1e6)]
            for lease in batch:
                arguments += [lease.message.id, lease.claim]
            with self._lock:
                expiry, *numbers = cast("list[int]", self._call(queue, arguments))
            gone = set(numbers)
            for number, lease in enumerate(batch, start=1):
                if number in gone:
                    lost.append(lease)
                else:
                    lease.expires_at = expiry / 1e6
        return lost

    def _call(self, queue: str, arguments: Sequence[Argument]) -> Reply:
        slot = queue_slot(queue)
        asking: Address | None = None
        problem: BackendUnavailable | None = None
        deadline = time.monotonic() + self._options.timeout
        for _ in range(_MOST_ATTEMPTS):
            address = asking or self._topology.known(slot) or self._topology.discover(slot)
            try:
                connection = self._connect(address)
                if asking is not None:
                    connection.call("ASKING")
                return self._evaluate(connection, queue, arguments)
            except Redirected as error:
                target = self._topology.learn_redirect(error, address)
                asking = target if error.code == "ASK" else None
                problem = error
            except ConnectionLost as error:
                # Extending twice is harmless: try again on a new connection.
                self._connections.pop(address, None)
                self._topology.invalidate(slot, address)
                asking, problem = None, error
                if time.monotonic() >= deadline:
                    # The server does not answer. Leases expire in the meantime, and their holder must be informed in
                    # time.
                    break
        raise BackendUnavailable(f"leases of {queue} cannot be extended now: {problem}") from problem

    def _connect(self, address: Address) -> BlockingConnection:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = BlockingConnection(self._options, address)
        return connection

    def _evaluate(self, connection: BlockingConnection, queue: str, arguments: Sequence[Argument]) -> Reply:
        found = self._scripts.get("extend", flags=not (0, 0) < connection.version < (7, 0))
        keys = [self._scripts.key(queue, part) for part in found.keys]
        try:
            return connection.call("EVALSHA", found.sha, len(keys), *keys, *arguments)
        except NoScript:
            return connection.call("EVAL", found.source, len(keys), *keys, *arguments)
