"""Calls for each of many queues. If one queue cannot be used, the others are not affected."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.backend.contract import Backend
from qworker.errors import BackendError, BackendUnavailable, QueueNotFound
from qworker.logs import one_line
from qworker.message import QueueStats, State
from qworker.url import mask

__all__ = ["can_be_of_one_queue", "count_queues", "describe_problem", "find_problem"]


def can_be_of_one_queue(backend: Backend, error: Exception) -> bool:
    """Return whether other queues may work although a call for one queue raised this error.

    In a directory each queue has its own permissions and files. A server that cannot be reached serves no queue.
    """
    return backend.directory is not None or not isinstance(error, BackendUnavailable | OSError)


async def count_queues(backend: Backend, queues: Sequence[str]) -> list[QueueStats]:
    """Count the messages of some queues.

    Returns:
        The counts. A queue that cannot be used has its `problem` instead. A queue that does not exist is left out.

    Raises:
        BackendUnavailable: The server cannot be reached.
    """
    counted: list[QueueStats] = []
    for queue in queues:
        try:
            counted.append(await backend.stats(queue))
        except QueueNotFound:
            # The queue was deleted after it was listed.
            continue
        except (BackendError, OSError) as error:
            if not can_be_of_one_queue(backend, error):
                raise
            counted.append(QueueStats(queue=queue, problem=describe_problem(error)))
    return counted


async def find_problem(backend: Backend, queue: str) -> str | None:
    """Return why a queue cannot be used. None: it can be, or does not exist.

    Raises:
        BackendUnavailable: The server cannot be reached.
    """
    try:
        # The cheapest call that opens a queue.
        await backend.parts(queue, State.READY, 1)
    except QueueNotFound:
        return None
    except (BackendError, OSError) as error:
        if not can_be_of_one_queue(backend, error):
            raise
        return describe_problem(error)
    return None


def describe_problem(error: Exception) -> str:
    """Return an error of a store as one line without passwords."""
    return mask(one_line(str(error)))
