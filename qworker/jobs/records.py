"""What is stored for the callers of a job: its result and its progress, as cells of its queue.

The rank of a cell is twice the fencing token of the delivery that writes it, so a stale holder never replaces what a
later delivery has written. A cancel writes one more than that: a late result of the same delivery does not replace it,
and a delivery after a requeue does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from qworker.cell import MOST_VALUE, Cell, CellOp
from qworker.errors import UsageError

__all__ = [
    "CANCELS",
    "PROGRESS",
    "RESULTS",
    "WAITS",
    "WAITS_NOTED_EVERY",
    "AwaitedJob",
    "Progress",
    "StoredProgress",
    "StoredResult",
    "check_progress",
    "delete_progress",
    "delete_wait",
    "get_cell",
    "put_progress",
    "put_result",
    "put_wait",
    "rank_of",
    "read_progress",
    "read_result",
    "read_wait",
]

# The groups of the cells. The name of each cell is the id of its message.
RESULTS, PROGRESS, CANCELS, WAITS = "results", "progress", "cancels", "waits"

# Seconds for which a progress is kept that no settlement has deleted: its worker was killed.
_PROGRESS_KEPT = 86_400.0
# Seconds between two puts of the note of a wait. It expires if two of them do not come: its worker was killed.
WAITS_NOTED_EVERY = 15.0
_WAIT_KEPT = 3 * WAITS_NOTED_EVERY


class StoredResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a job, as the value of its cell.

    Attributes:
        state: How it ended. `too_big` and `not_encodable` are the end of a message that was acked.
        value: The value that the handler returned, as JSON.
        error_type: The name of the class of the error.
        text: The error that is kept with the message.
        code: Why the message failed.
        started_at: Unix seconds at which the handler started. None: it did not.
        finished_at: Unix seconds at which it ended.
    """

    state: Literal["done", "failed", "cancelled", "too_big", "not_encodable"]
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error_type: str = ""
    text: str = ""
    code: str = ""
    started_at: float | None = None
    finished_at: float | None = None


class Progress(msgspec.Struct, frozen=True):
    """What a handler has reported with `Context.progress`.

    Attributes:
        done: How much is done.
        total: How much there is in all. None: it is not known.
        text: A text for people.
        data: Values by name, as JSON holds them.
    """

    done: float
    total: float | None = None
    text: str = ""
    data: Mapping[str, object] = {}


class AwaitedJob(msgspec.Struct, frozen=True):
    """The job that a running handler waits for, as the value of the cell of the message that waits.

    Attributes:
        queue: The queue of the job.
        id: The id of its message.
    """

    queue: str
    id: str


class StoredProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a running handler, as the value of its cell.

    Attributes:
        progress: The last progress.
        started_at: Unix seconds at which the handler started.
    """

    progress: Progress
    started_at: float | None = None


_encode = msgspec.json.Encoder().encode
_decode_result = msgspec.json.Decoder(StoredResult).decode
_decode_wait = msgspec.json.Decoder(AwaitedJob).decode
_decode_progress = msgspec.json.Decoder(StoredProgress).decode


def check_progress(progress: Progress) -> Progress:
    """Return a progress as it is stored.

    Raises:
        UsageError: It cannot be encoded as JSON, or is too large.
    """
    try:
        encoded = _encode(StoredProgress(progress))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(f"progress: it cannot be encoded as JSON: {error}") from error
    if len(encoded) > MOST_VALUE // 2:
        raise UsageError(f"progress: it must have at most {MOST_VALUE // 2} bytes of JSON (got {len(encoded)})")
    return progress


def get_cell(group: str, message_id: str) -> CellOp:
    """Return the operation that reads a cell of a job."""
    return CellOp("get", Cell(group, message_id))


def put_result(message_id: str, rank: int, result: StoredResult, ttl: float) -> CellOp:
    """Return the operation that stores the end of a job. A value that is too large is not stored."""
    value = _encode(result)
    if len(value) > MOST_VALUE:
        value = _encode(
            StoredResult("too_big", started_at=result.started_at, finished_at=result.finished_at)
            if result.state == "done"
            else msgspec.structs.replace(result, text=result.text[:1000])
        )
    return CellOp("put", Cell(RESULTS, message_id, value, rank=rank, ttl=ttl))


def put_progress(message_id: str, rank: int, progress: StoredProgress, ttl: float | None) -> CellOp:
    """Return the operation that stores the progress of a job. `ttl` None: its handler runs."""
    return CellOp(
        "put", Cell(PROGRESS, message_id, _encode(progress), rank=rank, ttl=_PROGRESS_KEPT if ttl is None else ttl)
    )


def delete_progress(message_id: str) -> CellOp:
    """Return the operation that deletes the progress of a job."""
    return CellOp("delete", Cell(PROGRESS, message_id))


def rank_of(token: int) -> int:
    """Return the rank of what the holder of a lease stores. That of a cancel of this delivery is one more."""
    return 2 * token


def put_wait(message_id: str, rank: int, job: AwaitedJob) -> CellOp:
    """Return the operation that notes which job a running handler waits for."""
    return CellOp("put", Cell(WAITS, message_id, _encode(job), rank=rank, ttl=_WAIT_KEPT))


def delete_wait(message_id: str, version: str) -> CellOp:
    """Return the operation that deletes the note of a wait, if it has this version."""
    return CellOp("delete", Cell(WAITS, message_id), version)


def read_wait(cell: Cell | None) -> AwaitedJob | None:
    """Return the job that a handler waits for, or None if it waits for none, or for one that cannot be read here."""
    try:
        return None if cell is None else _decode_wait(cell.value)
    except msgspec.MsgspecError:
        return None


def read_result(cell: Cell | None) -> StoredResult | None:
    """Return the end of a job from its cell, or None if there is none, or one that this release cannot read."""
    try:
        return None if cell is None else _decode_result(cell.value)
    except msgspec.MsgspecError:
        return None


def read_progress(cell: Cell | None) -> StoredProgress | None:
    """Return the progress of a job from its cell, or None if there is none, or one that this release cannot read."""
    try:
        return None if cell is None else _decode_progress(cell.value)
    except msgspec.MsgspecError:
        return None
