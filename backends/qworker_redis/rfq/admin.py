"""The administration of topics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from qworker.message import FinishedMessage, QueueStats, State
from qworker_redis.admin import BATCH, Call, ids_and_times, make_stats, read_rows
from qworker_redis.connections import ConnectionPool
from qworker_redis.keys import queue_key
from qworker_redis.rfq.ids import published_at
from qworker_redis.rfq.keys import PARTS, parse_topic, rfq_key
from qworker_redis.topology import queue_slot

__all__ = ["delete_topic", "list_topics", "read_topic_stats", "remove_call"]

# Keys that one command lists.
_SCAN = 1000


async def list_topics(pool: ConnectionPool, parts: Sequence[str]) -> list[str]:
    """Return the topics that have one of some keys, sorted.

    There is no register, because other programs create topics too.
    """
    found = await asyncio.gather(*[_scan(pool, part) for part in parts])
    return sorted({topic for topics in found for topic in topics})


async def _scan(pool: ConnectionPool, part: str) -> set[str]:
    topics: set[str] = set()
    kind = "hash" if part == "meta" else "list"
    cursor = b"0"
    while True:
        reply = await pool.command(0, "SCAN", cursor, "MATCH", rfq_key("*", part), "COUNT", _SCAN, "TYPE", kind)
        cursor, keys = cast("tuple[bytes, list[bytes]]", reply)
        topics |= {topic for key in keys if (topic := parse_topic(key, part)) is not None}
        if cursor == b"0":
            return topics


async def delete_topic(pool: ConnectionPool, topic: str, with_history: bool) -> None:
    """Delete a topic with all of its messages, including those that other consumers hold."""
    for state in (State.READY, State.LEASED, State.DELAYED, State.FAILED):
        while await pool.run_script("remove", topic, (state.value, BATCH)) not in {0, -1}:
            pass
    keys = [rfq_key(topic, part) for part in ("backlog", "nextlog", *PARTS)]
    if with_history:
        keys.append(queue_key(topic, "history"))
    await pool.command(queue_slot(topic), "UNLINK", *keys)


async def read_topic_stats(pool: ConnectionPool, topic: str, retention: Mapping[str, str]) -> QueueStats:
    """Count a topic. The messages of other consumers count as leased."""
    *counts, oldest = await read_rows(pool, "stats", topic, ())
    since: float | None = None
    if oldest:
        name, enqueued_at = cast("tuple[bytes, bytes]", oldest)
        since = int(enqueued_at) / 1e6 if enqueued_at else published_at(name.decode(errors="replace"))
    return make_stats(topic, cast("list[int]", counts), since, retention)


def remove_call(found: Sequence[FinishedMessage]) -> Call:
    """Return the call that deletes failed messages which are still unchanged."""
    return "remove", ["unchanged", *ids_and_times(one for one in found if one.state is State.FAILED)]
