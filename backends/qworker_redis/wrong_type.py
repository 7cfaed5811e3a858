"""Keys of a queue that have another type than qworker's: this queue cannot be used, and all others can."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.errors import QueueDamaged
from qworker_redis.connection import Argument, Connection, pack
from qworker_redis.scripts import ScriptSet

__all__ = ["damage_of", "find_wrong_keys"]

# For each type: its name in texts, and a read that fails if a key has another type. The users of workers may have no
# permission for `TYPE`.
_TYPES: dict[str, tuple[str, str, tuple[Argument, ...]]] = {
    "hash": ("a hash", "HGET", ("",)),
    "list": ("a list", "LLEN", ()),
    "string": ("a string", "STRLEN", ()),
    "stream": ("a stream", "XRANGE", ("-", "+", "COUNT", 1)),
    "zset": ("a sorted set", "ZCARD", ()),
}


async def find_wrong_keys(connection: Connection, scripts: ScriptSet, queue: str) -> list[tuple[str, str]]:
    """Return the keys that a queue needs and that have another type: each, and the type it must have, in words."""
    kinds = {scripts.key(queue, part): kind for part, kind in scripts.types.items()}
    keys = [(key, *_TYPES[kind]) for key, kind in (kinds | dict(scripts.shared)).items()]
    replies = await connection.send_all([pack((command, key, *more)) for key, _, command, more in keys])
    return [
        (key.decode(errors="replace"), words)
        for (key, words, _, _), reply in zip(keys, replies, strict=True)
        if isinstance(reply, QueueDamaged)
    ]


def damage_of(queue: str, wrong: Sequence[tuple[str, str]]) -> QueueDamaged:
    """Return the error of a queue with keys of another type. It names the first one, and says what to do."""
    if not wrong:
        return QueueDamaged(f"queue {queue!r} had a key of another type, which is gone now: try again")
    key, words = wrong[0]
    return QueueDamaged(
        f"queue {queue!r} cannot be used, because the Redis key {key} is not {words}: "
        "rename this key, or delete it if nothing needs it"
    )
