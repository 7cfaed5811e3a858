"""The native Redis backend: `redis:`, `rediss:`, `unix:`, `redis+sentinel:` and `redis+cluster:` URLs."""

from __future__ import annotations

from qworker_redis.backend import RedisBackend

__all__ = ["RedisBackend"]
