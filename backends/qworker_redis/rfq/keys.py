"""The keys of a topic: the three of rfq, and those that qworker adds."""

from __future__ import annotations

from qworker.errors import InvalidName
from qworker.names import check_existing_queue
from qworker_redis.scripts import ScriptSet

__all__ = ["PARTS", "RFQ", "decode_id", "parse_topic", "rfq_key"]

_OWN = frozenset({"backlog", "nextlog", "message"})
# The keys that qworker adds to a topic. They are deleted with the topic. None of them may end like the lists of rfq, or
# rfq would list one more topic.
PARTS = {
    "meta": "hash",
    "leased": "zset",
    "claims": "hash",
    "delayed": "zset",
    "failed": "zset",
    "tries": "hash",
    "errors": "hash",
    "enqueued": "hash",
    "origins": "hash",
}
_LISTS = {"backlog": "list", "nextlog": "list"}


def rfq_key(topic: str, part: str) -> bytes:
    """Return a key of a topic. `message` is followed by a colon and an id."""
    return (f"rfq:{topic}:{part}" if part in _OWN else f"rfq:{topic}:qworker:{part}").encode()


def parse_topic(key: bytes, part: str) -> str | None:
    """Return the topic of a key of this part, or None for a key of another program."""
    beginning, end = b"rfq:", rfq_key("", part)[4:]
    if not (key.startswith(beginning) and key.endswith(end)):
        return None
    try:
        return check_existing_queue(key[len(beginning) : -len(end)].decode())
    except (InvalidName, UnicodeDecodeError):
        return None


def decode_id(name: bytes) -> str:
    """Decode an id. Other programs may have made it, so it need not be UTF-8."""
    return name.decode(errors="surrogateescape")


RFQ = ScriptSet("rfq", rfq_key, _LISTS | PARTS)
