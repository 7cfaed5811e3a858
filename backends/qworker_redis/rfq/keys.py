"""The keys of a topic: rfq's own three, and qworker's beside them."""

from __future__ import annotations

from qworker.errors import InvalidName
from qworker.names import check_queue
from qworker_redis.scripts import ScriptSet

__all__ = ["PARTS", "RFQ", "parse_topic", "rfq_key"]

_OWN = frozenset({"backlog", "nextlog", "message"})
# What qworker keeps of a topic: gone when the topic is deleted. None may end as rfq's lists do, or rfq would list a topic more.
PARTS = ("meta", "leased", "claims", "delayed", "failed", "tries", "errors", "enqueued", "origins")


def rfq_key(topic: str, part: str) -> bytes:
    """A key of a topic; `message` is followed by a colon and an id."""
    return (f"rfq:{topic}:{part}" if part in _OWN else f"rfq:{topic}:qworker:{part}").encode()


def parse_topic(key: bytes, part: str) -> str | None:
    """The topic that a key of this part belongs to; None for keys of other programs."""
    beginning, end = b"rfq:", rfq_key("", part)[4:]
    if not (key.startswith(beginning) and key.endswith(end)):
        return None
    try:
        return check_queue(key[len(beginning) : -len(end)].decode())
    except (InvalidName, UnicodeDecodeError):
        return None


RFQ = ScriptSet(
    "rfq",
    rfq_key,
    (
        "create",
        "extend",
        "giveback",
        "lease",
        "look",
        "peek",
        "publish",
        "reap",
        "remove",
        "requeue",
        "settle",
        "stats",
    ),
)
