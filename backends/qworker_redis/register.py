"""The register of queues: the set `qworker:queues` with the names of all queues of a server."""

from __future__ import annotations

from typing import cast

from qworker.errors import PermissionDenied, QueueDamaged, StorageFull
from qworker.names import is_queue_name
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.keys import REGISTER
from qworker_redis.topology import queue_slot

__all__ = ["QueueRegister"]

# The slot of the register is that of a queue with this name.
_SLOT = queue_slot("queues")


class QueueRegister:
    """The register, as one backend knows it.

    Args:
        pool: The connections of the backend.

    Attributes:
        known: The queues that this instance has put into the register.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self.known: set[str] = set()

    async def _command(self, command: str, *queues: str) -> Reply:
        try:
            return await self._pool.command(_SLOT, command, REGISTER, *queues)
        except QueueDamaged as error:
            raise QueueDamaged(
                f"the names of the queues cannot be used, because the Redis key {REGISTER.decode()} is not a set: "
                "rename this key, or delete it if nothing needs it"
            ) from error

    async def names(self) -> list[str]:
        """Return the names of all queues, sorted."""
        names = cast("list[bytes]", await self._command("SMEMBERS"))
        # Other programs can add names that no queue can have.
        decoded = (name.decode(errors="replace") for name in names)
        return sorted(name for name in decoded if is_queue_name(name))

    async def create(self, queue: str) -> None:
        """Create a queue, and add it to the register if it is not there."""
        try:
            await self._pool.run_script("create", queue, ("create",))
        except QueueDamaged:
            # `qworker doctor` finds it in the register.
            await self._add(queue)
            raise
        try:
            await self._add(queue)
        except (StorageFull, PermissionDenied):
            # A full store refuses writes, and a worker that only consumes must be able to start there.
            if queue not in await self.names():
                raise

    async def on_stored(self, queue: str, new: bool) -> None:
        """Add a queue in which messages were stored if it is new, or not known to be in the register."""
        if new or queue not in self.known:
            await self._add(queue)

    async def _add(self, queue: str) -> None:
        await self._command("SADD", queue)
        self.known.add(queue)

    async def remove(self, queue: str) -> None:
        """Remove a queue that is deleted."""
        await self._command("SREM", queue)
