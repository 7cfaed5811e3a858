"""The state that all parts of one backend share: its options, its connections, its name and its background tasks."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Coroutine
from typing import Any

import structlog

from qworker.clock import Clock
from qworker_redis.connections import ConnectionPool
from qworker_redis.host_clock import HostClock
from qworker_redis.options import Options
from qworker_redis.own_leases import OwnLeases
from qworker_redis.scripts import ScriptSet
from qworker_redis.topology import make_topology, queue_slot

__all__ = ["UNDO_TIMEOUT", "RedisStore"]

# Seconds for which a cancelled call waits until it is undone, and for which `aclose` waits for background tasks.
UNDO_TIMEOUT = 1.0


class RedisStore:
    """A Redis, Redis with sentinels, or a Redis cluster.

    Args:
        options: The parsed URL.
        scripts: The scripts of the protocol, and its names of keys.
        clock: Measures how much time has passed. The time of day is the server's.

    Attributes:
        host_clock: That measure, which all processes of this host share.
        own: The leases of this instance.
        holder: The name of this instance. No other instance has it, in any process.
    """

    def __init__(self, options: Options, scripts: ScriptSet, clock: Clock) -> None:
        self.options = options
        self.scripts = scripts
        self.host_clock = HostClock(clock)
        self.own = OwnLeases()
        self.topology = make_topology(options)
        self.pool = ConnectionPool(options, self.topology, scripts)
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40]
        self.holder = f"{host}:{os.getpid()}:{secrets.token_hex(4)}"
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log: Any = structlog.get_logger("qworker.redis")

    async def open(self) -> None:
        """Connect to the server, and refuse one that may lose queues."""
        await self.pool.open(queue_slot("queues"))

    async def aclose(self) -> None:
        """Wait for the background tasks."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=UNDO_TIMEOUT)
            for task in late:
                task.cancel()

    @property
    def durability(self) -> str:
        """`replicated` with `?min_replicas=`, `disk` with `appendfsync always`, otherwise or if unknown `process`."""
        if self.options.min_replicas:
            return "replicated"
        return "process" if self.pool.server_info is None else self.pool.server_info.durability

    def start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that outlives the call that needs it. An error is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.warning("redis_background_task_failed", error=str(task.exception()))
