"""Confirmed actions on messages: they run in this process, in batches, and can be stopped after each.

A process that dies has done some of the batches. The same ticket does the rest: each message is changed only if it is
still as it was found, and what has failed after the ticket's moment does not match its filter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal

import msgspec

from qworker.backend import Backend
from qworker.backend.each_queue import describe_problem
from qworker.errors import QworkerError, UsageError
from qworker.failures.bulk import Batch, remove_in_batches, requeue_in_batches
from qworker.jobs.source import JobSource
from qworker.message import Selection
from qworker.names import id_forms
from qworker.ui.access import Access
from qworker.ui.audit import ActionRecord, record
from qworker.ui.filters import words_of
from qworker.ui.tickets import Ticket
from qworker.ui.watch import Watch

__all__ = ["Work", "Works"]

# Actions that run at once, and that are remembered.
_MOST_RUNNING = 4
_MOST_KEPT = 200


class Work(msgspec.Struct, kw_only=True):
    """One confirmed action.

    Attributes:
        ticket: What was confirmed.
        state: `stopping`: it ends after this batch.
        changed: Number of messages that were changed by this process.
        skipped: Number of messages that were found, but had changed before they could be, or were refused.
        left_out: Number of messages that match and are left out, by their code. The ticket does not count them.
        problem: Why it has failed, or why some were refused.
    """

    ticket: Ticket
    state: Literal["running", "stopping", "stopped", "done", "failed"] = "running"
    changed: int = 0
    skipped: int = 0
    left_out: dict[str, int] = {}
    problem: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether it still changes messages."""
        return self.state in {"running", "stopping"}

    @property
    def left(self) -> int:
        """Number of messages that are left. After the end, none is: others have changed the rest."""
        return 0 if self.state == "done" else max(0, self.ticket.count - self.changed - self.skipped)

    @property
    def elsewhere(self) -> int:
        """Number of messages that another process, or an earlier one, has changed since the ticket was made."""
        return max(0, self.ticket.count - self.changed - self.skipped) if self.state == "done" else 0


class Works:
    """The confirmed actions of this process.

    Args:
        watch: What knows the store.
        source: Returns the app, for cancels that were begun.

    Attributes:
        started: How often one was started.
    """

    def __init__(self, watch: Watch, source: Callable[[], JobSource]) -> None:
        self._watch = watch
        self._source = source
        self._works: dict[str, Work] = {}
        self.started = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def find(self, nonce: str) -> Work | None:
        """Return the work of a ticket. None: this process does not know it."""
        return self._works.get(nonce)

    def start(self, ticket: Ticket, access: Access) -> Work:
        """Carry out a ticket, or go on if it was stopped. A ticket whose work runs or is done changes nothing.

        Raises:
            UsageError: Too many actions run.
        """
        work = self._works.get(ticket.nonce)
        if work is not None and (work.is_running or work.state == "done"):
            return work
        if len(self._tasks) >= _MOST_RUNNING:
            raise UsageError(f"{_MOST_RUNNING} actions are running: wait for one, or stop it")
        if work is None:
            work = self._works[ticket.nonce] = Work(ticket=ticket)
        # Those that were skipped are looked at once more.
        work.state, work.problem, work.skipped, work.left_out = "running", None, 0, {}
        task = asyncio.create_task(self._run(work, access), name=f"qworker-ui-{ticket.action}")
        self._tasks[ticket.nonce] = task
        self.started += 1
        task.add_done_callback(lambda _: self._tasks.pop(ticket.nonce, None))
        self._forget()
        return work

    def stop(self, nonce: str) -> None:
        """End a work after its batch."""
        work = self._works.get(nonce)
        if work is not None and work.state == "running":
            work.state = "stopping"

    async def aclose(self) -> None:
        """End all works after their batches. Idempotent."""
        for nonce in list(self._tasks):
            self.stop(nonce)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _run(self, work: Work, access: Access) -> None:
        backend: Backend | None = None
        try:
            backend = await self._watch.backend()
            await record(backend, _record_of(work, access))
            async with aclosing(self._batches(backend, work.ticket)) as batches:
                async for batch in batches:
                    _add(work, batch)
                    if work.state == "stopping":
                        work.state = "stopped"
                        break
                else:
                    work.state = "done"
        except (QworkerError, OSError) as error:
            work.state, work.problem = "failed", describe_problem(error)
        finally:
            if work.is_running:
                # This task was cancelled.
                work.state = "stopped"
            self._watch.looks.expire()
        if backend is not None:
            await record(backend, _record_of(work, access))

    def _batches(self, backend: Backend, ticket: Ticket) -> AsyncGenerator[Batch]:
        match ticket.action:
            case "requeue many":
                return requeue_in_batches(backend, self._source(), ticket.queue, ticket.matching)
            case "remove many":
                return remove_in_batches(backend, ticket.queue, ticket.matching)
            case "remove":
                return _remove(backend, ticket, Selection(ids=id_forms(ticket.id)))
            case "purge":
                return _remove(backend, ticket, Selection(state=ticket.state))

    def _forget(self) -> None:
        for nonce in list(self._works)[: max(0, len(self._works) - _MOST_KEPT)]:
            if nonce not in self._tasks:
                del self._works[nonce]


async def _remove(backend: Backend, ticket: Ticket, selection: Selection) -> AsyncGenerator[Batch]:
    yield Batch(await backend.remove(ticket.queue, selection))


def _add(work: Work, batch: Batch) -> None:
    work.changed += batch.changed
    work.skipped += batch.unchanged
    for code, count in batch.left_out.items():
        work.left_out[code] = work.left_out.get(code, 0) + count
    if batch.refused is not None:
        work.problem = str(batch.refused)


def _record_of(work: Work, access: Access) -> ActionRecord:
    ticket = work.ticket
    result = {"running": "begun", "stopping": "begun", "failed": work.problem or "failed"}.get(work.state, work.state)
    return ActionRecord(
        at=ticket.at,
        user=access.name,
        role=access.role,
        action=ticket.action,
        queue=ticket.queue,
        what=ticket.state.word if ticket.action == "purge" else ticket.id,
        filter=", ".join(words_of(ticket.matching)),
        count=work.changed,
        result=result,
        key=ticket.nonce,
    )
