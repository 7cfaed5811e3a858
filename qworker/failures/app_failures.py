"""Requeue the failed calls of an app. See `Tasks.requeue`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qworker.definition.task_options import check_time
from qworker.duration import Moment
from qworker.errors import AlreadyEnqueued, QueueNotFound
from qworker.failures.bulk import Requeued, requeue_matching
from qworker.failures.message_filter import MessageFilter
from qworker.jobs.source import JobApp, JobSource

__all__ = ["make_filter", "requeue_in"]


def make_filter(
    task: str | None, error: str | None, code: str | None, group: str | None, since: Moment | None
) -> MessageFilter:
    """Return the filter of arguments of which each is optional.

    Raises:
        UsageError: An argument is not valid.
    """
    return MessageFilter(
        tasks=() if task is None else (task,),
        error=error,
        codes=() if code is None else (code,),
        groups=() if group is None else (group,),
        since=None if since is None else check_time("since", since),
    )


async def requeue_in(app: JobApp, queues: Sequence[str], matching: MessageFilter) -> Requeued:
    """Make the failed messages of some queues ready that match. A queue that does not exist has none.

    Raises:
        AlreadyEnqueued: Another message has the unique key of one of them. All others are ready.
    """
    backend = await app.backend()
    count = 0
    left_out: Counter[str] = Counter()
    refused: AlreadyEnqueued | None = None
    for queue in queues:
        try:
            result = await requeue_matching(backend, JobSource(app, None), queue, matching)
        except QueueNotFound:
            continue
        except AlreadyEnqueued as error:
            refused = refused or error
            continue
        count += result.count
        left_out.update(result.left_out)
    if refused is not None:
        raise refused
    return Requeued(count, left_out)
