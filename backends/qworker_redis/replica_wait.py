"""Writes that count only when as many replicas have them as the URL asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost, Reply
from qworker_redis.options import Options

__all__ = ["BATCH", "BATCH_BYTES", "run_replicated"]

# Messages per script call, counting one more for each 8 KiB of a body: a server does nothing else meanwhile.
BATCH = 500
BATCH_BYTES = 8192


async def run_replicated(
    options: Options,
    pool: ConnectionPool,
    connection: Connection,
    name: str,
    queue: str,
    arguments: Sequence[Argument],
    extra: Sequence[str],
) -> Reply:
    """Run a script, and wait until enough replicas have its writes.

    Raises:
        ConnectionLost: too few confirm in time; the write has been made, and may be repeated.
    """
    reply = await pool.evaluate(connection, name, queue, arguments, extra)
    wanted = options.min_replicas
    if wanted:
        seconds = options.timeout / 2
        confirmed = cast("int", await connection.send("WAIT", wanted, int(seconds * 1000), within=seconds))
        if confirmed < wanted:
            raise ConnectionLost(f"only {confirmed} of {wanted} replicas confirmed the write", sent=True)
    return reply
