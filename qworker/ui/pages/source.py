"""What every page is made from, and why a page cannot be shown."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

import msgspec

from qworker.app import Tasks
from qworker.clock import Clock
from qworker.sampling import QueueSnapshot
from qworker.ui.looks import Look
from qworker.ui.page_error import PageError
from qworker.ui.pages.charts import Drawings
from qworker.ui.scans import Scans
from qworker.ui.watch import Seen, Watch

__all__ = ["Forbidden", "NoSuchPage", "Source", "Unreachable", "known_queue", "value_of"]

T = TypeVar("T")


class NoSuchPage(PageError):
    """The page's queue or message does not exist."""

    status = HTTPStatus.NOT_FOUND


class Forbidden(PageError):
    """The user's role may not see it."""

    status = HTTPStatus.FORBIDDEN


class Unreachable(PageError):
    """The store cannot be asked now."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class Source(msgspec.Struct, frozen=True):
    """What pages are made from.

    Attributes:
        watch: The source of all numbers.
        clock: The clock.
        tasks: The app, which can say more about a message. None: it is not known.
        scans: The searches of users.
        drawings: The charts that were drawn.
    """

    watch: Watch
    clock: Clock
    tasks: Tasks | None
    scans: Scans = msgspec.field(default_factory=Scans)
    drawings: Drawings = msgspec.field(default_factory=Drawings)


def value_of(look: Look[T]) -> T:
    """Return what a search has found.

    Raises:
        Unreachable: It has failed, or takes long.
    """
    if look.value is None:
        raise Unreachable(look.problem or "the search takes long: try again in a moment")
    return look.value


def known_queue(seen: Seen, name: str) -> QueueSnapshot:
    """Return the sample of a queue.

    Raises:
        NoSuchPage: The queue does not exist.
        Unreachable: The store cannot be asked.
    """
    one = seen.queue(name)
    if one is None:
        if seen.problem is not None:
            raise Unreachable(seen.problem)
        raise NoSuchPage(f"there is no queue {name} in {seen.store}")
    return one
