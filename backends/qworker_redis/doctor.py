"""The checks of `qworker doctor redis://...`: the server of a URL, and whether queues are safe and fast there."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from qworker.clock import SYSTEM_CLOCK
from qworker.errors import BackendError, QueueDamaged, QworkerError
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.kit.doctor_sizes import check_sizes
from qworker.url import BackendURL
from qworker_redis.admin import read_too_large
from qworker_redis.connection import Connection, connect, pack
from qworker_redis.connections import ConnectionPool
from qworker_redis.lender import Lender
from qworker_redis.options import Options
from qworker_redis.scripts import ScriptSet
from qworker_redis.server_info import ServerInfo, read_server_info, require_safe
from qworker_redis.store import RedisStore
from qworker_redis.topology import make_topology, queue_slot

__all__ = ["check_message_sizes", "check_server"]

_PINGS = 20
# In seconds.
_SLOW = 0.005
_SKEW = 5.0
# Wrong keys that are named.
_SHOWN = 5

QueueNames = Callable[[ConnectionPool], Awaitable[list[str]]]


async def check_server(url: BackendURL, scripts: ScriptSet, names: QueueNames) -> list[Check]:
    """Check the server of a URL, and the queues there.

    Args:
        url: The URL.
        scripts: The scripts of the protocol.
        names: Returns the names of the queues.

    Returns:
        The checks. Nothing if the server cannot be reached, because another check reports that.
    """
    options = Options.parse(url)
    try:
        address = await make_topology(options).discover(queue_slot("queues"))
        lender = Lender(address, options.timeout, partial(connect, options, address))
        connection = await lender.take()
    except QworkerError:
        return []
    try:
        info = await read_server_info(connection)
        return [
            _version(info),
            _policy(info),
            _persistence(info, options),
            _replicas(info, options),
            await _latency(connection),
            await _clock(connection),
            await _scripts(connection, scripts),
            await _types(options, scripts, names),
        ]
    except BackendError as error:
        return [Check("redis", CheckStatus.BROKEN, str(error), "see the server's log")]
    finally:
        lender.give(connection)
        await lender.aclose()


def _version(info: ServerInfo) -> Check:
    version = f"{info.product} {'.'.join(map(str, info.version))}"
    if (0, 0) < info.version < (6, 2):
        return Check("redis version", CheckStatus.BROKEN, version, "upgrade to 6.2 or newer")
    return Check("redis version", CheckStatus.OK, f"{version} at {info.address}, {info.role or 'unknown role'}")


def _policy(info: ServerInfo) -> Check:
    name = "redis memory"
    if not info.policy:
        return Check(
            name, CheckStatus.WARN, "maxmemory-policy unknown", "check that it is noeviction: this user cannot run INFO"
        )
    limit = f"of {info.max_memory:,} bytes" if info.max_memory else "bytes, no limit"
    detail = f"maxmemory-policy {info.policy}, used {info.used_memory:,} {limit}"
    try:
        require_safe(info)
    except BackendError:
        return Check(name, CheckStatus.BROKEN, detail, "CONFIG SET maxmemory-policy noeviction, and in redis.conf")
    return Check(name, CheckStatus.OK, detail)


def _persistence(info: ServerInfo, options: Options) -> Check:
    name = "redis persistence"
    level = "replicated" if options.min_replicas else info.durability
    detail = f"{level}: appendonly {'yes' if info.append_only else 'no'}, appendfsync {info.fsync or 'unknown'}"
    if info.durability == "disk":
        return Check(name, CheckStatus.OK, detail)
    fix = "appendonly yes and appendfsync always survive a power failure"
    if not info.append_only:
        fix += "; without appendonly a restart of Redis loses what came after its last snapshot"
    return Check(name, CheckStatus.WARN, detail, fix)


def _replicas(info: ServerInfo, options: Options) -> Check:
    name = "redis replicas"
    detail = f"{info.replicas} connected, {options.min_replicas} waited for"
    if info.replicas < options.min_replicas:
        return Check(name, CheckStatus.BROKEN, detail, "connect more replicas or lower ?min_replicas=")
    return Check(name, CheckStatus.OK, detail)


async def _latency(connection: Connection) -> Check:
    times: list[float] = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        await connection.send("PING")
        times.append(time.perf_counter() - began)
    times.sort()
    middle, worst = times[_PINGS // 2], times[-1]
    detail = f"{middle * 1e3:.2f} ms, at worst {worst * 1e3:.2f} ms"
    if middle > _SLOW:
        return Check("redis latency", CheckStatus.WARN, detail, "move workers nearer to Redis: each batch is a trip")
    return Check("redis latency", CheckStatus.OK, detail)


async def _clock(connection: Connection) -> Check:
    began = time.time()
    seconds, microseconds = cast("list[bytes]", await connection.send("TIME"))
    here = (began + time.time()) / 2
    ahead = int(seconds) + int(microseconds) / 1e6 - here
    detail = f"{ahead:+.3f} s apart from this host's clock"
    if abs(ahead) > _SKEW:
        fix = "set both clocks (NTP): leases go by the server's, and due_at= by the publisher's"
        return Check("redis clock", CheckStatus.WARN, detail, fix)
    return Check("redis clock", CheckStatus.OK, detail)


async def _types(options: Options, scripts: ScriptSet, names: QueueNames) -> Check:
    """Check the types of the keys of all queues."""
    name, fix = "redis keys", "rename each, or delete it if nothing needs it"
    pool = ConnectionPool(options, make_topology(options), scripts, is_logged=False)
    wrong: list[str] = []
    try:
        queues = await names(pool)
        for queue in queues:
            wrong += [f"{key} is not {kind}" for key, kind in await pool.find_wrong_keys(queue)]
    except QueueDamaged as error:
        return Check(name, CheckStatus.BROKEN, f"the names of the queues cannot be read: {error}", fix)
    except BackendError as error:
        return Check(name, CheckStatus.WARN, f"not checked: {error}", "see the server's log")
    finally:
        await pool.aclose()
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return Check(name, CheckStatus.BROKEN, "; ".join(wrong[:_SHOWN]) + more, fix)
    return Check(name, CheckStatus.OK, f"those of {len(queues)} queues have the right types")


async def _scripts(connection: Connection, scripts: ScriptSet) -> Check:
    sources = [scripts.get(name, flags=connection.takes_flags).source for name in scripts.names()]
    replies = await connection.send_all([pack(("SCRIPT", "LOAD", source)) for source in sources])
    for reply in replies:
        if isinstance(reply, BackendError):
            fix = "allow this user the commands in docs/reference/redis.md"
            return Check("redis scripts", CheckStatus.BROKEN, str(reply), fix)
    return Check("redis scripts", CheckStatus.OK, f"{len(replies)} understood")


async def check_message_sizes(url: BackendURL, scripts: ScriptSet, names: QueueNames) -> list[Check]:
    """Check the sizes of delayed messages: `lease` delays those that are larger than `max_body`.

    Args:
        url: The URL.
        scripts: The scripts of the protocol.
        names: Returns the names of the queues.
    """
    options = Options.parse(url)
    if options.max_body is None:
        return []
    store = RedisStore(options, scripts, SYSTEM_CLOCK)
    sizes: list[tuple[str, int]] = []
    try:
        await store.open()
        for queue in await names(store.pool):
            found = await read_too_large(store.pool, queue, options.max_body)
            sizes += [(f"{queue}/{name.decode(errors='replace')}", size) for name, size in found]
    except BackendError:
        # Another check reports it.
        return []
    finally:
        await store.pool.aclose()
    return [check_sizes(sizes, options.max_body)]
