"""Run a failed call once more with other arguments.

The edited call is another message, `<id>:e1`, which is published before the failed one is removed. A process that dies
in between leaves both. The repetition finds the edited one and removes the failed one. Its id stays taken for a day, so
no repetition enqueues it twice.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from qworker.backend import Backend
from qworker.backend.offers import held_until
from qworker.envelope import ORIGINAL_ID, Envelope, EnvelopeEncoder, open_envelope
from qworker.errors import AlreadyEnqueued, UsageError
from qworker.failures.groups import finished_message
from qworker.jobs.cancel import finish_all_cancels
from qworker.jobs.source import JobSource
from qworker.message import Draft, Message, Selection, State, StoredMessage
from qworker.names import to_message_id
from qworker.parcel import unpack

__all__ = ["EDITED", "RULES", "Arguments", "Edited", "arguments_of", "enqueue_edited", "read_arguments"]

# The header with the id of the failed message.
EDITED = "qworker-edited"
# The rules of the contract that a store must keep.
RULES = frozenset({"given_ids", "hold", "remove"})
# Seconds for which the id of the edited message stays taken.
_HOLD_S = 86_400.0
_EDITION = re.compile(r":e([0-9]{1,6})\Z")


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a call, as JSON.

    Attributes:
        args: The positional arguments.
        kwargs: The arguments by name.
    """

    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    def text(self) -> str:
        """Return them as JSON to be edited."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


class Edited(msgspec.Struct, frozen=True):
    """What became of an edited call.

    Attributes:
        id: The id of the edited message.
        is_new: Whether this call has stored it. False: an earlier one had.
        removed: Whether the failed message is removed. False: it is not failed any more, so it may run too.
    """

    id: str
    is_new: bool
    removed: bool


def read_arguments(text: str | bytes) -> Arguments:
    """Return the arguments of an edited text.

    Raises:
        UsageError: It is not a JSON object with `args` and `kwargs`.
    """
    try:
        return msgspec.json.decode(text, type=Arguments)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f'the arguments must be JSON such as {{"args": [1], "kwargs": {{}}}}: {error}') from error


def arguments_of(stored: StoredMessage) -> Arguments:
    """Return the arguments of a failed call.

    Raises:
        UsageError: The message has not failed, is not a call, or has more than its arguments.
    """
    if stored.state is not State.FAILED:
        raise UsageError(f"message {stored.message.id} is {stored.state.word}: only a failed message can be edited")
    envelope = _envelope_of(stored.message)
    return Arguments(envelope.args, envelope.kwargs)


def _envelope_of(message: Message) -> Envelope:
    opened = unpack(message)
    envelope = open_envelope(opened.body)
    if not isinstance(envelope, Envelope):
        raise UsageError(f"message {message.id} is not a valid call of a task: its arguments cannot be edited")
    if opened.fields:
        raise UsageError(f"message {message.id} has fields of another protocol: its arguments cannot be edited")
    return envelope


async def enqueue_edited(
    backend: Backend, source: JobSource, queue: str, stored: StoredMessage, edited: Arguments
) -> Edited:
    """Enqueue a failed call with other arguments, and remove the failed message.

    Args:
        backend: The store.
        source: The app. If it knows the task, the arguments must fit its signature.
        queue: The queue.
        stored: The failed message.
        edited: The arguments.

    Raises:
        UsageError: The message has not failed or is not a call, or the store cannot do this.
        InvalidArguments: The arguments do not fit the signature.
        AlreadyEnqueued: Another message has its unique key. Or it was edited before, with other arguments.
    """
    arguments_of(stored)
    message = stored.message
    missing = sorted(RULES & backend.deviations.keys())
    if missing:
        raise UsageError(f"a message of this store cannot be edited: {backend.deviations[missing[0]]}")
    given_id = _next_id(message.id)
    draft = msgspec.structs.replace(
        _draft_of(message), body=_body_of(message, edited, source, given_id), id=given_id, hold=_HOLD_S
    )
    await finish_all_cancels(backend, source, queue)
    is_new = not await _is_taken(backend, queue, draft)
    if is_new:
        await _publish(backend, queue, draft)
    removed = await backend.remove(queue, Selection(unchanged=[finished_message(stored)]))
    return Edited(to_message_id(given_id), is_new, bool(removed))


def _next_id(message_id: str) -> str:
    found = _EDITION.search(message_id)
    return f"{message_id}:e1" if found is None else f"{message_id[: found.start()]}:e{int(found[1]) + 1}"


def _body_of(message: Message, edited: Arguments, source: JobSource, given_id: str) -> bytes:
    envelope = _envelope_of(message)
    task = source.app.registered_tasks.get(envelope.task)
    if task is not None:
        task.signature.convert(edited.args, edited.kwargs)
    headers = {**envelope.headers, EDITED: message.id}
    if to_message_id(given_id) != given_id:
        headers[ORIGINAL_ID] = given_id
    return EnvelopeEncoder(envelope.task).encode(tuple(edited.args), edited.kwargs, headers, envelope.options)


def _draft_of(message: Message) -> Draft:
    envelope = _envelope_of(message)
    return Draft(
        body=b"",
        priority=message.priority,
        unique_key=message.unique_key,
        unique=message.unique,
        task=envelope.task,
    )


async def _is_taken(backend: Backend, queue: str, draft: Draft) -> bool:
    """Return whether an earlier call has stored the draft.

    Raises:
        AlreadyEnqueued: It has stored another one.
    """
    assert draft.id is not None
    message_id = to_message_id(draft.id)
    for stored in await backend.find(queue, [message_id]):
        if stored.message.body != draft.body:
            raise AlreadyEnqueued(f"the message was edited before, with other arguments: {message_id}", message_id)
        return True
    return await held_until(backend, queue, message_id) is not None


async def _publish(backend: Backend, queue: str, draft: Draft) -> None:
    assert draft.id is not None
    (message_id,) = await backend.publish(queue, [draft])
    if message_id != to_message_id(draft.id):
        raise AlreadyEnqueued(f"message {message_id} has the unique key {draft.unique_key}", message_id)
