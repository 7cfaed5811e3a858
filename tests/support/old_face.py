"""The backend contract of commit 31528ec on top of today's backends, for the suite of that commit.

`NAMES` has what was only renamed. A member that became another one is a method of `OldFace`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from qworker import bulk, message, worker
from qworker.app import Tasks as NewTasks
from qworker.backend import Backend as NewBackend
from qworker.browsing import list_messages
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.context import Context
from qworker.errors import Fail, NotSupported, QueueNotFound, Retry, UsageError
from qworker.errors import InvalidName as BadName
from qworker.history import event
from qworker.history.batch import to_batches
from qworker.message import Message
from qworker.message import SettleAction as Settle
from qworker.names import new_id
from qworker.registry import open_backend as open_new_backend
from qworker.testing.clock import FakeClock
from qworker.worker import WorkerOptions

# What the suite imports from qworker.
__all__ = [
    "SYSTEM_CLOCK",
    "Backend",
    "BadName",
    "Clock",
    "Context",
    "Draft",
    "Event",
    "Fail",
    "FakeClock",
    "Finished",
    "Lease",
    "Message",
    "NotSupported",
    "OldFace",
    "QueueNotFound",
    "QueueStats",
    "Retry",
    "Settle",
    "Settlement",
    "StagedPart",
    "Staging",
    "State",
    "StoredMessage",
    "Tasks",
    "UsageError",
    "Worker",
    "WorkerOptions",
    "batches_of",
    "new_id",
    "open_backend",
]

# By old name: attributes, methods, keyword arguments, members of enums and deviations that have another name today.
NAMES = {
    "FAIL": "FAILED",
    "arguments": "argv",
    "down": "paused",
    "end": "last_position",
    "event": "kind",
    "fail": "failed",
    "how": "action",
    "job": "name",
    "key": "unique_key",
    "oldest_age": "oldest_age_s",
    "on": "enabled",
    "origin": "original_id",
    "place": "location",
    "purge": "remove_by_state",
    "words": "describe_retention",
}
# A rule and an attribute of that name are called otherwise.
_OLD_NAMES = {new: old for old, new in NAMES.items()} | {"pause": "down"}

# Deviations that the suite does not know: it has no test of their rules.
NEW_RULES = frozenset({"after_removed", "keep_done", "retry_errors"})


class State(StrEnum):
    """The states as they were called."""

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    DONE = "done"
    FAIL = "fail"


class View:
    """A value of today, whose attributes are found by their old names too."""

    def __init__(self, new: Any) -> None:
        self.new = new

    def __getattr__(self, name: str) -> Any:
        return _old(getattr(self.new, name if hasattr(self.new, name) else NAMES.get(name, name)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and self.new == other.new

    def __hash__(self) -> int:
        return hash(self.new)

    def __repr__(self) -> str:
        return repr(self.new)


def _old(value: Any) -> Any:
    """A value that the suite sees."""
    if isinstance(value, message.State):
        return next(state for state in State if _new(state) is value)
    return View(value) if isinstance(value, Message) else value


def _new(value: Any) -> Any:
    """A value that a backend is given."""
    if isinstance(value, State):
        return message.State[NAMES.get(value.name, value.name)]
    return value.new if isinstance(value, View) else value


def _made(kind: Any, given: Mapping[str, Any]) -> Any:
    known = kind.__struct_fields__
    return kind(**{name if name in known else NAMES.get(name, name): _new(value) for name, value in given.items()})


def Draft(**given: Any) -> message.Draft:  # noqa: N802
    """A message to be published."""
    return _made(message.Draft, given)


class Finished(View):
    """A done or failed message as a look found it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(_made(message.FinishedMessage, given))


class Event(View):
    """What happened to a message."""

    def __init__(self, **given: Any) -> None:
        super().__init__(_made(event.Event, given))


class Settlement(View):
    """The end of one lease."""

    def __init__(self, **given: Any) -> None:
        super().__init__(_made(message.Settlement, given))


class OldFace:
    """A backend of today with the members of then."""

    def __init__(self, new: NewBackend) -> None:
        self.new = new
        self.deviations = {
            _OLD_NAMES.get(rule, rule): reason for rule, reason in new.deviations.items() if rule not in NEW_RULES
        }
        self.shared = new.shared
        self.history = View(new.history)
        # Makes the backend again, which is not open yet, for remote leases.
        self.made_remote: Callable[[], NewBackend] | None = None

    @property
    def detached(self) -> bool:
        return self.new.remote_leases is not None

    @detached.setter
    def detached(self, detached: bool) -> None:
        if detached != self.detached:
            assert self.made_remote is not None
            self.new = self.made_remote()

    @classmethod
    def from_url(cls, url: Any, *, clock: Clock = SYSTEM_CLOCK) -> OldFace:
        return open_backend(str(url), clock=clock)

    async def open(self) -> None:
        await self.new.open()

    async def aclose(self) -> None:
        await self.new.aclose()

    def describe(self) -> str:
        return self.new.describe()

    @property
    def durability(self) -> str:
        return self.new.durability

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[message.Draft]) -> list[str]:
        return await self.new.publish(queue, drafts)

    def staging(self, queue: str, job: str, *, folder: Path | None = None) -> View:
        return View(bulk.open(self.new, queue, job, folder=folder))

    async def half_published(self, queue: str, *, folder: Path | None = None) -> list[View]:
        return [View(half) for half in await bulk.incomplete_loads(self.new, queue, folder=folder)]

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float) -> list[View]:
        return [View(lease) for lease in await self.new.lease(queue, limit, visibility)]

    async def wait_and_lease(self, queue: str, limit: int, visibility: float, timeout: float) -> list[View]:
        return [View(lease) for lease in await self.new.lease(queue, limit, visibility, timeout)]

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        await self.new.wait(queues, timeout)

    def extend(self, leases: Sequence[View], visibility: float) -> list[View]:
        lost = self.new.extend([lease.new for lease in leases], visibility)
        return [lease for lease in leases if lease.new in lost]

    async def resume(self, queue: str, message_id: str, token: int) -> View | None:
        remote = self.new.remote_leases
        lease = None if remote is None else await remote.find(queue, message_id, token)
        return None if lease is None else View(lease)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        refused = await self.new.settle([settlement.new for settlement in settlements])
        return [settlement for settlement in settlements if settlement.new in refused]

    async def reap(self, queue: str) -> int:
        return await self.new.reap(queue)

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        return await self.new.queues()

    async def create(self, queue: str) -> None:
        await self.new.create(queue)

    async def delete(self, queue: str) -> None:
        await self.new.delete(queue)

    async def stats(self, queue: str) -> View:
        return View(await self.new.stats(queue))

    async def browse(self, queue: str, state: State, limit: int = 100, offset: int = 0) -> list[View]:
        found = await list_messages(self.new, queue, message.Query(_new(state), limit=max(1, limit + offset)))
        return [View(stored) for stored in found[offset : offset + limit]]

    async def find(self, queue: str, message_id: str) -> View | None:
        found = await self.new.find(queue, [message_id])
        return View(found[0]) if found else None

    async def browse_parts(self, queue: str, state: State, wanted: int) -> list[str]:
        return await self.new.parts(queue, _new(state), wanted)

    async def browse_part(self, queue: str, state: State, part: str) -> Any:
        async for page in self.new.browse(queue, message.Query(_new(state), part=part)):
            yield [View(stored) for stored in page]

    async def discard(self, queue: str, found: Sequence[Finished]) -> int:
        return await self.new.remove(queue, message.Selection(unchanged=[one.new for one in found]))

    async def requeue(self, queue: str, ids: Any = None) -> int:
        return await self.new.requeue(
            queue, _by_ids(ids) if ids is not None else message.Selection(state=_new(State.FAIL))
        )

    async def remove(self, queue: str, ids: Any) -> int:
        return await self.new.remove(queue, _by_ids(ids))

    async def purge(self, queue: str, state: State | None = None) -> int:
        states = (State.DELAYED, State.READY, State.FAIL) if state is None else (state,)
        return sum([await self.new.remove(queue, message.Selection(state=_new(one))) for one in states])

    async def down(self, queue: str) -> None:
        await self.new.pause(queue)

    async def up(self, queue: str) -> None:
        await self.new.resume(queue)

    # -- the history -------------------------------------------------------------------------------------------------

    def record(self, batches: Any) -> None:
        self.new.history.append(batches)

    async def history_parts(self) -> list[str]:
        return await self.new.history.logs()

    async def read_history(self, part: str, after: str | None, limit: int) -> tuple[list[View], str | None]:
        events, position = await self.new.history.read(part, after, limit)
        return [View(one) for one in events], position

    async def forget_history(self, part: str, until: str) -> None:
        await self.new.history.delete_before(part, until)

    async def message_history(self, queue: str, message_id: str) -> list[View]:
        return [View(one) for one in await self.new.history.for_message(queue, message_id)]


def _by_ids(ids: Any) -> message.Selection:
    return message.Selection(ids=list(ids))


def open_backend(url: str, *, clock: Clock = SYSTEM_CLOCK) -> OldFace:
    """The backend of a URL, as it was."""
    face = OldFace(open_new_backend(url, clock=clock))
    face.made_remote = functools.partial(open_new_backend, url, clock=clock, remote_leases=True)
    return face


class Tasks(NewTasks[Any]):
    """An app of the suite."""

    def handler(self, *, queue: str) -> Any:
        return self.raw_handler(queue=queue)


class Worker(worker.Worker):
    """A worker for an app of the suite, which gives it an `OldFace`."""

    def __init__(self, app: Tasks, options: WorkerOptions) -> None:
        faced = app.backend

        async def backend() -> NewBackend:
            return (await faced()).new

        vars(app)["backend"] = backend
        super().__init__(app, options)


def batches_of(events: Sequence[Event]) -> Any:
    """Events as a worker records them."""
    return to_batches([one.new for one in events])


# They only annotate.
Backend = Lease = QueueStats = StoredMessage = StagedPart = Staging = Any
