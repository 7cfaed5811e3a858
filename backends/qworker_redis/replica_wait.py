"""Writes that count only if the number of replicas that the URL requires have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import ConnectionLost, Reply
from qworker_redis.options import Options

__all__ = ["BATCH", "BATCH_BYTES", "run_replicated"]

# Messages in one script call, plus one for each 8 KiB of a body. A script call blocks all other clients of the server.
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
        ConnectionLost: Too few replicas confirm in time. The write was made, and can be repeated.
    """
    reply = await pool.evaluate(connection, name, queue, arguments, extra)
    wanted = options.min_replicas
    if wanted:
        seconds = options.timeout / 2
        confirmed = cast("int", await connection.send("WAIT", wanted, int(seconds * 1000), within=seconds))
        if confirmed < wanted:
            raise ConnectionLost(f"only {confirmed} of {wanted} replicas confirmed the write", sent=True)
    return reply
