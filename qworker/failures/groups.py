"""Groups of failures: failed messages with the same task and the same error, apart from its values."""

from __future__ import annotations

import hashlib
import re
from typing import Generic, TypeVar

import msgspec

from qworker.envelope import Envelope, open_envelope
from qworker.failure_text import blank_values, code_of, summary
from qworker.message import FinishedMessage, Message, StoredMessage
from qworker.parcel import unpack

__all__ = [
    "FailureGroup",
    "GroupCounts",
    "GroupedFailures",
    "finished_message",
    "group_of",
    "make_group",
    "task_of",
]

# Characters of an error that count.
_MOST = 300
_TYPE = re.compile(r"([^\W\d]\w*(?:\.\w+)*)(?=:|\Z)")


class FailureGroup(msgspec.Struct, frozen=True):
    """What failed messages have in common.

    Attributes:
        key: A short text that identifies the group in every store and release.
        task: The task's name. None: raw messages.
        code: Why they failed: `error`, `timeout`, `poison`, `arguments`, `expired` or `cancelled`.
        error_type: The class of the exception. Empty: the error is not an exception.
        error: The first line of the error, without quoted text, numbers and ids.
    """

    key: str
    task: str | None
    code: str
    error_type: str
    error: str


class GroupCounts(msgspec.Struct, kw_only=True):
    """A group as it is stored in a queue.

    Attributes:
        group: The group. None: all further messages, if there are too many groups.
        count: Number of messages.
        first_at: Unix seconds at which the first one failed. None: the store does not know it.
        last_at: Unix seconds at which the last one failed.
        example: The id of the last one.
    """

    group: FailureGroup | None
    count: int = 0
    first_at: float | None = None
    last_at: float | None = None
    example: str = ""

    def add(self, stored: StoredMessage) -> None:
        """Count a message."""
        at = stored.finished_at
        self.count += 1
        if at is not None and (self.first_at is None or at < self.first_at):
            self.first_at = at
        if not self.example or (at is not None and (self.last_at is None or at >= self.last_at)):
            self.last_at, self.example = at, stored.message.id


Counts = TypeVar("Counts", bound=GroupCounts)


class GroupedFailures(Generic[Counts]):
    """Counts failed messages by their group, in bounded memory.

    Args:
        kind: The class of a group's counts.
        most: Groups with a count of their own. An error without a pattern, such as a random text, would have a
            group for each message.
    """

    def __init__(self, kind: type[Counts], most: int) -> None:
        self._kind = kind
        self._most = most
        self._counts: dict[str, Counts] = {}
        self._others = kind(group=None)

    def add(self, group: FailureGroup | None, stored: StoredMessage) -> FailureGroup | None:
        """Count a message of a group. Return the group as all its messages share it. None: there are too many."""
        counts = None if group is None else self._counts.get(group.key)
        if counts is None and group is not None and len(self._counts) < self._most:
            counts = self._counts[group.key] = self._kind(group=group)
        counts = counts or self._others
        counts.add(stored)
        return counts.group

    def largest(self) -> list[Counts]:
        """Return the groups, the largest first, and the group of all further messages at the end."""
        found = sorted(self._counts.values(), key=lambda counts: counts.count, reverse=True)
        return [*found, self._others] if self._others.count else found


def group_of(stored: StoredMessage) -> FailureGroup:
    """Return the group of a failed message."""
    return make_group(task_of(stored.message), stored.error)


def make_group(task: str | None, error: str | None) -> FailureGroup:
    """Return the group of a task's error.

    Args:
        task: The task's name, or None.
        error: The text that is kept with the message, such as a traceback.
    """
    text = error or ""
    code = code_of(text) or "error"
    line = summary(text)[:_MOST]
    found = _TYPE.match(line)
    blanked = blank_values(line)
    parts = "\0".join(("" if task is None else f"task {task}", code, blanked))
    key = hashlib.sha256(parts.encode(errors="surrogatepass")).hexdigest()[:10]
    return FailureGroup(key, task, code, "" if found is None else found[1], blanked)


def finished_message(stored: StoredMessage) -> FinishedMessage:
    """Return what names a finished message, to read or change it only if it is unchanged."""
    return FinishedMessage(
        id=stored.message.id, state=stored.state, finished_at=stored.finished_at, location=stored.location
    )


def task_of(message: Message) -> str | None:
    """Return the task that a message calls, also if its envelope is not valid. None: a raw message."""
    opened = open_envelope(unpack(message).body)
    if isinstance(opened, Envelope):
        return opened.task
    return None if opened is None else opened[0]
