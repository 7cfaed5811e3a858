"""A call of a task that is not enqueued yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from qworker.envelope import add_headers, open_envelope
from qworker.jobs.job import Job
from qworker.jobs.source import JobSource
from qworker.message import Draft, KeyHolder
from qworker.names import created_id, is_created_id, to_message_id

__all__ = ["Call"]


class Call(msgspec.Struct, frozen=True):
    """A call that is not enqueued yet, for `Tasks.enqueue_many`.

    Attributes:
        queue: The queue of the call.
        draft: The message.
        span_context: The context of the OpenTelemetry span in which it was created. None without a span.
        source: What its job knows of its task.
    """

    queue: str
    draft: Draft
    span_context: Any = None
    source: JobSource | None = None

    def job(self, message_id: str) -> Job[Any]:
        """Return the job of the call, which was stored under this id."""
        if self.draft.unique_key is None:
            return Job(message_id, self.queue, False if self.draft.id is None else None, self.source)
        # A key that counts in all queues can be that of a message in another one.
        queue = message_id.queue if isinstance(message_id, KeyHolder) else self.queue
        return Job(message_id, queue, _existed(self.draft, message_id), self.source)

    def identified(self) -> Call:
        """Return this call with an id, if it has a unique key: so the id that is stored shows whether it is new."""
        draft = self.draft
        if draft.unique_key is None or draft.id is not None:
            return self
        return msgspec.structs.replace(self, draft=msgspec.structs.replace(draft, id=created_id()))

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.draft.task or ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the call: texts by name."""
        opened = open_envelope(self.draft.body)
        return {} if opened is None or isinstance(opened, tuple) else opened.headers

    def with_headers(self, headers: Mapping[str, str]) -> Call:
        """Return this call with more headers, such as a hook adds in `Hook.publishing`.

        Raises:
            UsageError: They are not texts by name.
        """
        body = add_headers(self.draft.body, headers)
        return msgspec.structs.replace(self, draft=msgspec.structs.replace(self.draft, body=body))


def _existed(draft: Draft, stored: str) -> bool | None:
    """Return whether a draft with a unique key was not stored because another message was there. None: not known."""
    if draft.id is None:
        return None
    if stored != to_message_id(draft.id):
        return True
    return False if is_created_id(draft.id) else None
