"""The columns of a batch, taken from a worker's deliveries at the least cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from qworker.history.batch import EventBatch
from qworker.task import RawHandler
from qworker.worker.delivery import Delivery

__all__ = ["AckColumns", "by_queue", "task_column"]

T = TypeVar("T")

# Characters that are kept of the name of an unknown task.
_MOST_NAME = 200


class AckColumns:
    """The acked messages of one queue, as growing columns. Messages that were settled together are a group."""

    def __init__(self, worker: str, queue: str) -> None:
        self._worker = worker
        self._queue = queue
        self._clear()

    def _clear(self) -> None:
        self.ids: list[str] = []
        self._tries: list[int] = []
        self._enqueued_at: list[float | None] = []
        self._durations: list[int | None] = []
        # By group.
        self._sizes: list[int] = []
        self._at: list[float] = []
        self._tasks: list[str | list[str | None] | None] = []
        self._tokens: list[list[int | None]] = []
        self._leased_at: list[list[float | None]] = []

    def add(self, deliveries: Sequence[Delivery], at: float) -> None:
        """Add the columns of some deliveries."""
        leases = [delivery.lease for delivery in deliveries]
        messages = [lease.message for lease in leases]
        self.ids += [message.id for message in messages]
        self._tries += [message.tries for message in messages]
        self._enqueued_at += [message.enqueued_at for message in messages]
        self._durations += [int(delivery.duration * 1e6) for delivery in deliveries]
        self._sizes.append(len(deliveries))
        self._at.append(at)
        self._tasks.append(task_column(deliveries))
        self._tokens.append([lease.token for lease in leases])
        self._leased_at.append([delivery.leased_at for delivery in deliveries])

    def move_to(self, batches: list[EventBatch]) -> None:
        """Append a batch of them to `batches`, and clear the columns."""
        if not self.ids:
            return
        batches.append(
            EventBatch(
                kind="acked",
                queue=self._queue,
                worker=self._worker,
                at=self._at,
                id=self.ids,
                groups=self._sizes,
                task=self._task_column(),
                tries=self._tries if any(self._tries) else 0,
                token=_by_group(self._tokens),
                enqueued_at=self._enqueued_at,
                duration_us=self._durations,
                begins=True,
                leased_at=_by_group(self._leased_at),
            )
        )
        self._clear()

    def _task_column(self) -> str | list[str | None] | None:
        first = self._tasks[0]
        if not isinstance(first, list) and all(task == first for task in self._tasks):
            return first
        column: list[str | None] = []
        for task, size in zip(self._tasks, self._sizes, strict=True):
            column += task if isinstance(task, list) else [task] * size
        return column


def _by_group(groups: list[list[T]]) -> list[T]:
    """Return one value for each group if all groups have only one value, otherwise one for each message."""
    if all(group.count(group[0]) == len(group) for group in groups):
        return [group[0] for group in groups]
    return [value for group in groups for value in group]


def by_queue(deliveries: Sequence[Delivery]) -> Iterable[tuple[str, list[Delivery]]]:
    """Group deliveries by their queue, in their order."""
    found: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        queue = delivery.lease.message.queue
        some = found.get(queue)
        if some is None:
            found[queue] = [delivery]
        else:
            some.append(delivery)
    return found.items()


def task_column(deliveries: Sequence[Delivery]) -> str | list[str | None] | None:
    """Return the names of the tasks. The name of a raw message is None."""
    handlers = {delivery.handler for delivery in deliveries}
    if len(handlers) == 1:
        (handler,) = handlers
        if handler is not None:
            return None if isinstance(handler, RawHandler) else handler.name
    return [
        None if isinstance(delivery.handler, RawHandler) or not delivery.task else delivery.task[:_MOST_NAME]
        for delivery in deliveries
    ]
