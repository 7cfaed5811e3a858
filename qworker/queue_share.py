"""How a worker shares its leases among its queues."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from qworker.errors import UsageError
from qworker.names import check_existing_queue
from qworker.validation import check_text, check_whole

__all__ = ["QueueShare", "check_shares", "parse_queue_share"]

# Queues of other programs can have colons in their names: only a number at the end is a weight.
_WRITTEN = re.compile(r"([^=]+?)(?::(-?[0-9]+))?(?:=(-?[0-9]+))?")


class QueueShare(msgspec.Struct, frozen=True):
    """A queue of a worker, and how much the worker leases from it.

    Attributes:
        name: The queue.
        weight: Its share of each lease, relative to the weights of the other queues.
        concurrency: Maximum number of its messages at once in this worker. None: only the worker's own limit.

    Raises:
        UsageError: The name is not valid, or a number is less than 1.
    """

    name: str
    weight: int = 1
    concurrency: int | None = None

    def __post_init__(self) -> None:
        check_existing_queue(check_text("queue", self.name))
        check_whole("weight", self.weight, 1)
        if self.concurrency is not None:
            check_whole("concurrency", self.concurrency, 1)


def parse_queue_share(text: str) -> QueueShare:
    """Parse `NAME[:WEIGHT][=CONCURRENCY]`.

    Raises:
        UsageError: It has another form, or is not a valid share.
    """
    match = _WRITTEN.fullmatch(text)
    if match is None:
        raise UsageError(f"-Q {text}: write NAME, NAME:WEIGHT, NAME=CONCURRENCY or NAME:WEIGHT=CONCURRENCY")
    name, weight, concurrency = match.groups()
    check_existing_queue(name)
    try:
        return QueueShare(name, int(weight or 1), None if concurrency is None else int(concurrency))
    except UsageError as error:
        raise UsageError(f"-Q {text}: the {error}") from None


def check_shares(shares: Sequence[QueueShare] | None, *, strict: bool) -> None:
    """Check that the queues of a worker fit together.

    Raises:
        UsageError: A queue is named twice, or the queues have no strict order.
    """
    names = [share.name for share in shares or ()]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"queue {name} is named twice: name it once, with a weight if it is to get more")
    if not strict:
        return
    if not names:
        raise UsageError("a strict order needs the names of the queues: give them, the most important first")
    for share in shares or ():
        if share.weight != 1:
            raise UsageError(f"a strict order has no weights: leave out the weight of {share.name} or the order")
