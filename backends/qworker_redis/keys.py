"""The keys of a queue, and the key of the register of queues."""

from __future__ import annotations

from qworker_redis.scripts import ScriptSet

__all__ = ["APP_KEYS", "NATIVE", "PARTS", "REGISTER", "queue_key"]

# The names of all queues of a server: a set.
REGISTER = b"qworker:queues"
# The messages that have the unique keys that count in all queues: see `common.lua`.
APP_KEYS = b"{qworker:}:appkeys"
# What a queue has, and the type of each. A bulk write has more keys (`bulk.py`).
PARTS = {
    "meta": "hash",
    "msg": "hash",
    "ready": "list",
    "sorted": "zset",
    "delayed": "zset",
    "leased": "zset",
    "claims": "hash",
    "keys": "hash",
    "errors": "hash",
    "fail": "zset",
    "done": "zset",
    "gone": "hash",
    "holds": "zset",
    "cells": "hash",
    "celldue": "zset",
    "cellnames": "zset",
    "wake": "list",
    "history": "stream",
    "samples": "string",
    "jobs": "hash",
    "seals": "hash",
}


def queue_key(queue: str, part: str) -> bytes:
    """Return a key of a queue. The braces put all keys of a queue into one slot of a cluster."""
    return f"{{qworker:{queue}}}:{part}".encode()


NATIVE = ScriptSet("", queue_key, PARTS, {APP_KEYS: "hash"})
