"""Who works: the workers that a history has seen, and the holders of leases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from qworker.failures.groups import task_of
from qworker.message import StoredMessage
from qworker.sampling import WorkerSeen
from qworker.tools.running import RunningJob

__all__ = ["RunningMessage", "WorkerStatus", "join_workers"]

# The names of holders: of workers on Redis, of workers on a directory, and of all workers in the history.
_NAMES = (
    re.compile(r"(?P<host>.+):(?P<pid>[0-9]+):[0-9a-f]+"),
    re.compile(r"(?P<host>.+)-(?P<pid>[0-9]+)-[0-9a-f]{8}-[0-9a-f]{6}"),
    re.compile(r"(?P<host>.+)-(?P<pid>[0-9]+)"),
)
# Characters of a host in the name of a holder on a directory.
_HOST = 10


class RunningMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a worker holds.

    Attributes:
        queue: Its queue.
        id: Its id.
        task: Its task. None: it is raw.
        started_at: Unix seconds at which its handler has started. None: it is not known, because the handler has not
            reported progress.
        expires_at: Unix seconds at which its lease expires, unless it is extended.
        progress: The share that is done, from 0 to 1. None: it is not known.
    """

    queue: str
    id: str
    task: str | None
    started_at: float | None = None
    expires_at: float | None = None
    progress: float | None = None


class WorkerStatus(msgspec.Struct, kw_only=True):
    """One worker process.

    Attributes:
        name: The name that the store or the history has for it.
        host: The machine. On a directory, this can be the beginning of its name. None: the name does not say it.
        pid: The process id on this machine.
        queues: The queues in which it was seen, sorted.
        seen_at: Unix seconds of the last event that it has recorded. None: none was seen.
        running: The messages that it holds.
    """

    name: str
    host: str | None = None
    pid: int | None = None
    queues: list[str] = []
    seen_at: float | None = None
    running: list[RunningMessage] = []


def join_workers(
    seen: Iterable[WorkerSeen], leases: Mapping[str, Sequence[StoredMessage]], jobs: Iterable[RunningJob] = ()
) -> list[WorkerStatus]:
    """Return the workers by name. A holder is a row of its own if it is not clear which worker it is.

    Args:
        seen: The workers of the history.
        leases: The leased messages, by queue.
        jobs: What is known about the handlers that have reported progress.
    """
    workers = [_named(one.worker, one.queues, one.at) for one in seen]
    by_process: dict[tuple[str | None, int | None], list[WorkerStatus]] = {}
    for worker in workers:
        by_process.setdefault(_process(worker), []).append(worker)
    reported = {(job.queue, job.id): job for job in jobs}
    holders: dict[str, WorkerStatus] = {}
    for queue, stored in ((queue, stored) for queue, some in leases.items() for stored in some):
        name = stored.holder or ""
        if name not in holders:
            holder = _named(name, [], None)
            same = by_process.get(_process(holder), [])
            # Two machines can have the same beginning of their names, and processes with the same id.
            holders[name] = same[0] if len(same) == 1 and holder.pid is not None else holder
            if holders[name] is holder:
                workers.append(holder)
        worker = holders[name]
        worker.queues = sorted({*worker.queues, queue})
        worker.running.append(_running(queue, stored, reported.get((queue, stored.message.id))))
    return sorted(workers, key=lambda worker: (not worker.running, worker.name))


def _named(name: str, queues: list[str], seen_at: float | None) -> WorkerStatus:
    found = next((match for one in _NAMES if (match := one.fullmatch(name))), None)
    host, pid = (None, None) if found is None else (found["host"], int(found["pid"]))
    return WorkerStatus(name=name, host=host, pid=pid, queues=queues, seen_at=seen_at, running=[])


def _process(worker: WorkerStatus) -> tuple[str | None, int | None]:
    host = worker.host
    return None if host is None else re.sub(r"[^A-Za-z0-9-]", "-", host)[:_HOST].strip("-"), worker.pid


def _running(queue: str, stored: StoredMessage, job: RunningJob | None) -> RunningMessage:
    share = None if job is None or not job.progress.total else job.progress.done / job.progress.total
    return RunningMessage(
        queue=queue,
        id=stored.message.id,
        task=task_of(stored.message),
        started_at=None if job is None else job.started_at,
        expires_at=stored.expires_at,
        progress=share,
    )
