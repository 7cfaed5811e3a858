"""The keys of a queue, and the key of the register of queues."""

from __future__ import annotations

from qworker_redis.scripts import ScriptSet

__all__ = ["NATIVE", "PARTS", "REGISTER", "queue_key"]

# The names of all queues of a server: a set.
REGISTER = b"qworker:queues"
# What a queue has. A bulk write has more keys (`bulk.py`).
PARTS = (
    "meta",
    "msg",
    "ready",
    "sorted",
    "delayed",
    "leased",
    "claims",
    "keys",
    "errors",
    "fail",
    "done",
    "gone",
    "wake",
    "history",
    "jobs",
    "seals",
)


def queue_key(queue: str, part: str) -> bytes:
    """Return a key of a queue. The braces put all keys of a queue into one slot of a cluster."""
    return f"{{qworker:{queue}}}:{part}".encode()


NATIVE = ScriptSet("", queue_key)
