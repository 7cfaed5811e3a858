"""Publish calls of one queue as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qworker.backend import Backend
from qworker.call import Call
from qworker.enqueue.tracing import send_batch_span
from qworker.jobs.job import Job

__all__ = ["BATCH", "publish_calls"]

# This many calls at a time, so that a generator of a million calls needs no memory for them.
BATCH = 1000


async def publish_calls(backend: Backend, calls: Sequence[Call]) -> list[Job[Any]]:
    """Publish calls of one queue, and return their jobs. All are stored durably when this returns."""
    queue = calls[0].queue
    calls = [call if call.draft.unique_key is None else call.identified() for call in calls]
    with send_batch_span(queue, [call.span_context for call in calls]):
        ids = await backend.publish(queue, [call.draft for call in calls])
    return [call.job(message_id) for call, message_id in zip(calls, ids, strict=True)]
