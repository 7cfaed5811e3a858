"""The workers: what each of them runs, and when it was seen last."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from qworker.backend.listing import list_messages
from qworker.message import Query, State, StoredMessage
from qworker.tools.running import RunningJob, read_running
from qworker.tools.workers import WorkerStatus, join_workers
from qworker.ui.looks import Look
from qworker.ui.pages.rows import leased_count
from qworker.ui.pages.source import Source
from qworker.ui.watch import Seen

__all__ = ["MOST_LEASES", "FoundWorkers", "find_workers", "workers"]

# Leased messages of a queue that are read.
MOST_LEASES = 500


class FoundWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a store.

    Attributes:
        sampled_at: Unix seconds at which the sampler has last looked. None: it has not yet.
        workers: The workers, those that hold messages first.
        cut: The queues that have more leased messages than were read.
        reading: The queues whose leased messages are being read.
        problems: Why the leased messages of a queue cannot be read.
        has_history: Whether workers keep a history. Otherwise only those that hold messages are known.
    """

    sampled_at: float | None = None
    workers: list[WorkerStatus]
    cut: list[str]
    reading: list[str]
    problems: dict[str, str]
    has_history: bool


class _Leases(msgspec.Struct, frozen=True):
    stored: list[StoredMessage]
    jobs: list[RunningJob]


async def workers(source: Source, _request: Request) -> dict[str, Any]:
    """Return the workers, and the messages that they hold."""
    seen = await source.watch.see()
    found = await find_workers(source, seen)
    running = [(worker, one) for worker in found.workers for one in worker.running]
    return {"seen": seen, "found": found, "running": running, "most": MOST_LEASES}


async def find_workers(source: Source, seen: Seen) -> FoundWorkers:
    """Return the workers that were seen, and those that hold messages."""
    names = [one.queue for one in seen.queues if one.problem is None and leased_count(one)]
    looks = dict(zip(names, await asyncio.gather(*(_leases(source, name) for name in names)), strict=True))
    values = {name: look.value for name, look in looks.items() if look.value is not None}
    leases = {name: value.stored[:MOST_LEASES] for name, value in values.items()}
    known = [] if seen.snapshot is None else seen.snapshot.workers
    return FoundWorkers(
        sampled_at=seen.sampled_at,
        workers=join_workers(known, leases, [job for value in values.values() for job in value.jobs]),
        cut=[name for name, value in values.items() if len(value.stored) > MOST_LEASES],
        reading=[name for name, look in looks.items() if look.at is None],
        problems={name: look.problem for name, look in looks.items() if look.problem is not None},
        has_history=seen.has_history,
    )


async def _leases(source: Source, queue: str) -> Look[_Leases]:
    async def read() -> _Leases:
        backend = await source.watch.backend()
        stored = await list_messages(backend, queue, Query(State.LEASED, limit=MOST_LEASES + 1))
        return _Leases(stored, await read_running(backend, queue, stored))

    return await source.watch.looks.look(("leases", queue), read)
