"""What a server says of itself: whether queues are safe there, and what a write survives."""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec

from qworker.errors import BackendError, PermissionDenied
from qworker_redis.connection import Wire
from qworker_redis.error_replies import Reply

__all__ = ["ServerFacts", "inspect", "refuse"]

_OLDEST = (6, 2)


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One server. Empty texts: it would not say."""

    address: str
    version: tuple[int, int]
    product: str = "Redis"
    policy: str = ""
    # Bytes; 0: no limit.
    max_memory: int = 0
    used_memory: int = 0
    append_only: bool = False
    # always, everysec or no.
    fsync: str = ""
    role: str = ""
    replicas: int = 0

    @property
    def durability(self) -> str:
        """What a successful write survives on this server alone: `process` or `disk`."""
        return "disk" if self.append_only and self.fsync == "always" else "process"


async def inspect(wire: Wire) -> ServerFacts:
    """Ask a server about itself."""
    info, config = wire.send("INFO"), wire.send("CONFIG", "GET", "appendfsync")
    fields = _fields(await _told(info))
    fsync = await _told(config)
    return ServerFacts(
        address=str(wire.address),
        version=wire.version,
        # Redis has no such line; Valkey 7.2 and later do.
        product=fields.get("server_name", "redis").capitalize(),
        policy=fields.get("maxmemory_policy", ""),
        max_memory=int(fields.get("maxmemory", 0)),
        used_memory=int(fields.get("used_memory", 0)),
        append_only=fields.get("aof_enabled") == "1",
        fsync=cast("list[bytes]", fsync)[1].decode()
        if isinstance(fsync, list) and len(cast("list[bytes]", fsync)) > 1
        else "",
        role=fields.get("role", ""),
        replicas=int(fields.get("connected_slaves", 0)),
    )


async def _told(asked: asyncio.Future[Reply]) -> Reply:
    """An answer; nothing where this user may not ask, or where a provider has taken the command away."""
    try:
        return await asked
    except PermissionDenied:
        return None
    except BackendError as error:
        if "unknown command" in str(error).lower() or "unknown subcommand" in str(error).lower():
            return None
        raise


def _fields(info: Reply) -> dict[str, str]:
    lines = info.decode(errors="replace").splitlines() if isinstance(info, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def refuse(facts: ServerFacts) -> None:
    """Refuse a server that cannot keep the promises.

    Raises:
        PermissionDenied: it is too old, or may evict queues.
    """
    if (0, 0) < facts.version < _OLDEST:
        version = ".".join(map(str, facts.version))
        raise PermissionDenied(f"Redis {version} at {facts.address} is too old: qworker needs 6.2 or newer")
    # volatile-* evicts only keys with a time to live, and queues have none.
    if facts.policy.startswith("allkeys"):
        raise PermissionDenied(
            f"Redis at {facts.address} may evict queues (maxmemory-policy {facts.policy}): set maxmemory-policy to noeviction"
        )
