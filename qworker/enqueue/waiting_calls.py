"""Calls that are made now and published later: at the end of a block, or after a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from qworker.call import Call
from qworker.enqueue.batches import BATCH, publish_calls
from qworker.errors import EnqueueFailed
from qworker.jobs.job import Job
from qworker.jobs.source import JobApp
from qworker.names import created_id, to_message_id

__all__ = ["WaitingCall", "send_calls", "wait_to_send"]


class WaitingCall(msgspec.Struct, frozen=True, eq=False):
    """A call that is published later.

    Attributes:
        app: The app whose backend takes it.
        call: The call, with its id.
        job: Its job, which the caller has.
    """

    app: JobApp
    call: Call
    job: Job[Any]


class _Unsent(msgspec.Struct, frozen=True, eq=False):
    waiting: WaitingCall
    error: Exception


def wait_to_send(app: JobApp, call: Call) -> WaitingCall:
    """Give a call its id, and check now what the store would refuse later.

    Raises:
        MessageTooLarge: Its body is larger than `max_body`.
        NotSupported: The store does not support one of its options, or takes no ids.
    """
    app._check_later(call.draft)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    given = call.draft.id
    message_id = created_id() if given is None else to_message_id(given)
    call = msgspec.structs.replace(call, draft=msgspec.structs.replace(call.draft, id=message_id))
    return WaitingCall(app, call, Job(message_id, call.queue, None, call.source))


async def send_calls(calls: Sequence[WaitingCall]) -> None:
    """Publish calls. The calls of a queue keep their order and are published in batches. A failure stops no other one.

    Raises:
        EnqueueFailed: Some calls are not stored, or it is unknown whether they are.
    """
    queues: dict[tuple[int, str], list[WaitingCall]] = {}
    for waiting in calls:
        queues.setdefault((id(waiting.app), waiting.call.queue), []).append(waiting)
    # At the same time: a store that cannot be reached costs its timeout once.
    unsent = [one for found in await asyncio.gather(*map(_send_queue, queues.values())) for one in found]
    if unsent:
        raise _failure(calls, unsent) from unsent[0].error


async def _send_queue(calls: Sequence[WaitingCall]) -> list[_Unsent]:
    return [one for batch in _batches(calls) for one in await _send_batch(batch)]


def _batches(calls: Sequence[WaitingCall]) -> Iterator[list[WaitingCall]]:
    """Yield batches. A call that its unique key can refuse is alone.

    The store raises that after it has stored the others of a batch. Then a worker may have acked them already, and to
    publish them again would run them twice.
    """
    batch: list[WaitingCall] = []
    for waiting in calls:
        unique = waiting.call.draft.unique
        is_alone = unique is not None and unique.again == "error"
        if batch and (is_alone or len(batch) >= BATCH):
            yield batch
            batch = []
        batch.append(waiting)
        if is_alone:
            yield batch
            batch = []
    if batch:
        yield batch


async def _send_batch(batch: Sequence[WaitingCall]) -> list[_Unsent]:
    try:
        jobs = await publish_calls(await batch[0].app.backend(), [waiting.call for waiting in batch])
    except Exception as error:  # noqa: BLE001 - it is raised when all calls were tried
        return [_Unsent(waiting, error) for waiting in batch]
    for waiting, sent in zip(batch, jobs, strict=True):
        _complete(waiting.job, sent)
    return []


def _complete(job: Job[Any], sent: Job[Any]) -> None:
    """Let the job that the caller has be the one that is stored: another message may have its unique key."""
    for name in ("id", "queue", "existed"):
        msgspec.structs.force_setattr(job, name, getattr(sent, name))


def _failure(calls: Sequence[WaitingCall], unsent: Sequence[_Unsent]) -> EnqueueFailed:
    missing = {id(one.waiting) for one in unsent}
    stored = [waiting.job for waiting in calls if id(waiting) not in missing]
    first = unsent[0]
    text = (
        f"{len(unsent)} of {len(calls)} calls may not be stored (queue {first.waiting.call.queue!r}: {first.error}):"
        " enqueue the calls in `unsent` of this error again"
    )
    return EnqueueFailed(text, stored, [one.waiting.call for one in unsent], [one.error for one in unsent])
