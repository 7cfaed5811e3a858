"""A call of a task that is not enqueued yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from qworker.definition.hints import exact_options
from qworker.definition.returns import check_result_type
from qworker.definition.task_options import call_options, check_result, needs_of, sent_options, unique_option
from qworker.definition.unique_key import check_by, key_by, without_function
from qworker.duration import Moment, Seconds
from qworker.envelope import ORIGINAL_ID, Envelope, add_headers, change_options, open_envelope
from qworker.jobs.job import Job
from qworker.jobs.source import JobSource
from qworker.message import Draft, KeyHolder
from qworker.names import created_id, is_created_id, to_message_id
from qworker.unique import Unique, check_due

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
            is_new = self.draft.id is None or is_created_id(self.draft.id)
            return Job(message_id, self.queue, False if is_new else None, self.source)
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

    @exact_options
    def using(  # noqa: PLR0913 - each argument is one option of a call
        self,
        *,
        delay: Seconds | None = None,
        due_at: Moment | None = None,
        priority: int | None = None,
        unique_key: str | None = None,
        id: str | None = None,  # noqa: A002
        queue: str | None = None,
        headers: Mapping[str, str] | None = None,
        hold: Seconds | None = None,
        unique: Unique | None = None,
        result: Seconds | msgspec.UnsetType | None = msgspec.UNSET,
        timeout: Seconds | msgspec.UnsetType | None = msgspec.UNSET,
        max_tries: int | msgspec.UnsetType | None = msgspec.UNSET,
        expires: Seconds | None = None,
    ) -> Call:
        """Return this call with other options. What is not given stays. See `Task.using`.

        Raises:
            InvalidName: `unique_key`, `id` or `queue` is not allowed.
            NotSupported: The backend of the app's URL does not support results, or unlimited tries.
            UsageError: There is a hold and no id, or an option has the wrong type or is out of range.
        """
        own_id = self.draft.id if id is None else id
        fields = call_options(delay, due_at, priority, unique_key, own_id, queue, headers, hold)
        known = None if self.source is None else self.source.app.registered_tasks.get(self.task)
        fields |= self._key_fields(unique_option(unique, fields).get("unique"), unique_key, known)
        if delay is not None:
            fields["due_at"] = None
        elif due_at is not None:
            fields["delay"] = 0.0
        both = {"delay": self.draft.delay, "due_at": self.draft.due_at, **fields}
        if expires is None and (delay is not None or due_at is not None):
            expires = self._expires()
        sent = sent_options(both, timeout, max_tries, expires)
        if id is not None and hold is None and known is not None:
            fields["hold"] = known.options.hold
        source = self.source
        if result is not msgspec.UNSET:
            sent["result"] = None if result is None else check_result(result)
            if result is not None and known is not None:
                check_result_type(self.task, known.function)
            source = None if source is None else source.changed(sent["result"], Any)
        if source is not None:
            needs = needs_of(unique, sent.get("max_tries", msgspec.UNSET), sent.get("result"))
            source.app._check_store(self.task, needs)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        body = change_options(self.draft.body, sent) if sent else self.draft.body
        if id is not None and fields["id"] != id:
            headers = {**(headers or {}), ORIGINAL_ID: id}
        if headers:
            body = add_headers(body, headers)
        draft = msgspec.structs.replace(self.draft, body=body, **fields)
        check_due(draft.unique, draft.delay, draft.due_at)
        return msgspec.structs.replace(self, queue=self.queue if queue is None else queue, draft=draft, source=source)

    def _key_fields(self, unique: Unique | None, unique_key: str | None, known: Any) -> dict[str, Any]:
        """Return the fields of another unique key: none if the call keeps its own."""
        if unique is None:
            # The options of the earlier key are not those of this one.
            return {} if unique_key is None else {"unique": None}
        key = unique.key
        if key is None:
            opened = open_envelope(self.draft.body)
            if known is None or not isinstance(opened, Envelope):
                raise without_function(unique.by or ())
            check_by(self.task, known.signature.parameters, unique)
            key = key_by(self.task, unique.by or (), known.signature.values(unique.by, opened.args, opened.kwargs))
        return {"unique_key": key, "unique": unique.for_draft()}

    def _expires(self) -> float | None:
        """Return the `expires` that the call has already, which its delay must not exceed."""
        opened = open_envelope(self.draft.body)
        return opened.options.expires if isinstance(opened, Envelope) and opened.options is not None else None


def _existed(draft: Draft, stored: str) -> bool | None:
    """Return whether a draft with a unique key was not stored because another message was there. None: not known."""
    if draft.id is None:
        return None
    if stored != to_message_id(draft.id):
        return True
    return False if is_created_id(draft.id) else None
