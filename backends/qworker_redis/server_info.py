"""The facts that a server reports about itself: whether queues are safe there, and what a write survives."""

from __future__ import annotations

from typing import cast

import msgspec

from qworker.errors import BackendError, BackendUnavailable, PermissionDenied
from qworker_redis.connection import Connection, pack
from qworker_redis.error_replies import Reply

__all__ = ["ServerInfo", "read_server_info", "require_primary", "require_safe"]

_OLDEST = (6, 2)


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One server. An empty text means that the server does not report the value."""

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
        """The durability of a successful write on this server alone: `process` or `disk`."""
        return "disk" if self.append_only and self.fsync == "always" else "process"


async def read_server_info(connection: Connection) -> ServerInfo:
    """Read what a server reports about itself."""
    info, config = await connection.send_all([pack(("INFO",)), pack(("CONFIG", "GET", "appendfsync"))])
    fields, fsync = _fields(_reply_or_none(info)), _reply_or_none(config)
    return ServerInfo(
        address=str(connection.address),
        version=connection.version,
        # Valkey 7.2 and later have this line. Redis does not.
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


def _reply_or_none(reply: Reply) -> Reply:
    """Return the answer, or None if this user has no permission or the provider has removed the command."""
    if not isinstance(reply, BackendError):
        return reply
    missing = "unknown command" in str(reply).lower() or "unknown subcommand" in str(reply).lower()
    if missing or isinstance(reply, PermissionDenied):
        return None
    raise reply


def _fields(info: Reply) -> dict[str, str]:
    lines = info.decode(errors="replace").splitlines() if isinstance(info, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def require_safe(info: ServerInfo) -> None:
    """Refuse a server that may lose queues.

    Raises:
        PermissionDenied: It is too old, or may evict queues.
    """
    if (0, 0) < info.version < _OLDEST:
        version = ".".join(map(str, info.version))
        raise PermissionDenied(f"Redis {version} at {info.address} is too old: qworker needs 6.2 or newer")
    # volatile-* evicts only keys with a time to live, and queues do not have one.
    if info.policy.startswith("allkeys"):
        raise PermissionDenied(
            f"Redis at {info.address} may evict queues (maxmemory-policy {info.policy}): "
            "set maxmemory-policy to noeviction"
        )


def require_primary(info: ServerInfo) -> None:
    """Refuse a server that sentinels still name, but which is a replica.

    Raises:
        BackendUnavailable: It is not a primary.
    """
    if info.role not in {"", "master"}:
        raise BackendUnavailable(f"the sentinels name {info.address}, which is not a primary")
