"""A call of a task that is not enqueued yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from qworker.envelope import add_headers, open_envelope
from qworker.jobs.job import Job
from qworker.jobs.source import JobSource
from qworker.message import Draft

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
        draft = self.draft
        existed = False if draft.id is None and draft.unique_key is None else None
        return Job(message_id, self.queue, existed, self.source)

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
