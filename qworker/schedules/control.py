"""`tasks.schedules`: put, remove, pause, run and list schedules."""

from __future__ import annotations

import builtins
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, TypeVar, cast

from qworker.backend import Backend
from qworker.backend.offers import store_time
from qworker.clock import Clock
from qworker.definition.hints import exact_options
from qworker.duration import Seconds
from qworker.errors import UsageError
from qworker.jobs.app_jobs import job_of
from qworker.jobs.job import Job
from qworker.jobs.source import JobApp
from qworker.schedules.code import CodeSchedule, check_deviations
from qworker.schedules.records import Definition
from qworker.schedules.schedule import CatchUp, Overlap, Schedule, check_name, definition_of, naming_schedule
from qworker.schedules.store import (
    ScheduleStatus,
    StoredSchedule,
    find_schedule,
    newest,
    put_definition,
    read_schedules,
    remove_schedule,
    set_paused,
    status_of,
)
from qworker.task import Call
from qworker.validation import check_text, shown

__all__ = ["Schedules", "run_now"]

R = TypeVar("R")


class App(JobApp, Protocol):
    """The members of the app that its schedules use."""

    clock: Clock

    def queue_names(self) -> list[str]:
        """Return the queues of all tasks and handlers."""
        ...


class Schedules:
    """The schedules of an app: `tasks.schedules`. Workers of the app tick them.

    Attributes:
        in_code: The schedules of `@tasks.cron` and `@tasks.every`, by name. They cannot be put or removed.
        since: Unix seconds. A schedule in the code that never ticked counts from then on. None: from the start of its
            first worker.
    """

    def __init__(self, tasks: App) -> None:
        self._tasks = tasks
        self.in_code: dict[str, CodeSchedule] = {}
        self.since: float | None = None

    def add(self, schedule: CodeSchedule) -> None:
        """Add a schedule of the code.

        Raises:
            UsageError: Its name is already used.
        """
        self._check_free(schedule.name)
        self.in_code[schedule.name] = schedule

    def include(self, other: Schedules, prefix: str) -> None:
        """Take the schedules in the code of another app, whose tasks come here too.

        Args:
            other: The schedules of that app. It has none afterwards.
            prefix: What their names begin with here.

        Raises:
            UsageError: A name is already used. Nothing is changed.
        """
        moved = {prefix + name: schedule for name, schedule in other.in_code.items()}
        for name in moved:
            check_name(name)
            self._check_free(name)
        for name, schedule in moved.items():
            schedule.rename(name)
        self.in_code.update(moved)
        other.in_code = {}

    def _check_free(self, name: str) -> None:
        if name in self.in_code:
            raise UsageError(f"the schedule name {name!r} is already used: give one of them another name (name=...)")

    # -- one schedule ------------------------------------------------------------------------------------------------

    @exact_options
    async def put(
        self,
        name: str,
        call: Call,
        *,
        cron: str | None = None,
        every: Seconds | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = "latest",
        overlap: Overlap = "allow",
    ) -> None:
        """Store a schedule, in place of one with the same name. It ticks from now on, until it is removed.

        Args:
            name: Its name.
            call: The call that each tick enqueues, from `task.call(...)`.
            cron: See `Schedule`.
            every: See `Schedule`.
            tz: See `Schedule`.
            catch_up: See `Schedule`.
            overlap: See `Schedule`.

        Raises:
            UsageError: An option is not valid, or the code defines a schedule with this name.
            NotSupported: The backend does not support schedules.
        """
        with naming_schedule(name):
            schedule = Schedule(call, cron, every, tz, catch_up, overlap)
        await self._put(await self._backend(), self._definition(name, schedule, None))

    def put_sync(
        self,
        name: str,
        call: Call,
        *,
        cron: str | None = None,
        every: Seconds | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = "latest",
        overlap: Overlap = "allow",
    ) -> None:
        """Store a schedule from code without an event loop. See `put`."""
        given = self.put(name, call, cron=cron, every=every, tz=tz, catch_up=catch_up, overlap=overlap)
        self._run_sync(given, "put(...)")

    async def remove(self, name: str) -> bool:
        """Remove a schedule that `put` or `sync` has stored. Its calls that wait still run.

        Returns:
            Whether there was one.

        Raises:
            UsageError: The code defines the schedule.
        """
        self._refuse_code(name, "remove it there, or pause it")
        backend = await self._backend()
        removed = False
        while (stored := await self._find(backend, name)) is not None:
            removed = await remove_schedule(backend, stored) or removed
        return removed

    def remove_sync(self, name: str) -> bool:
        """Remove a schedule from code without an event loop. See `remove`."""
        return self._run_sync(self.remove(name), "remove(...)")

    async def pause(self, name: str) -> None:
        """Pause a schedule: it does not tick until it is resumed. Idempotent.

        Raises:
            UsageError: There is no such schedule.
        """
        await self._set_paused(name, paused=True)

    def pause_sync(self, name: str) -> None:
        """Pause a schedule from code without an event loop. See `pause`."""
        self._run_sync(self.pause(name), "pause(...)")

    async def resume(self, name: str) -> None:
        """Resume a paused schedule. `catch_up` says what happens with the ticks that it has missed. Idempotent.

        Raises:
            UsageError: There is no such schedule.
        """
        await self._set_paused(name, paused=False)

    def resume_sync(self, name: str) -> None:
        """Resume a paused schedule from code without an event loop. See `resume`."""
        self._run_sync(self.resume(name), "resume(...)")

    async def run(self, name: str) -> Job[Any]:
        """Enqueue one call of a schedule now, out of turn. Its ticks do not change.

        Raises:
            UsageError: There is no such schedule.
        """
        backend = await self._backend()
        definition = await self._definition_of(backend, name)
        message_id = await run_now(backend, definition, self._tasks.clock.time())
        task = self._tasks.registered_tasks.get(definition.task)
        if task is None:
            return job_of(self._tasks, message_id, definition.queue, Any)
        job: Job[Any] = task.job(message_id, queue=definition.queue)
        return job

    def run_sync(self, name: str) -> Job[Any]:
        """Enqueue one call of a schedule now from code without an event loop. See `run`."""
        return self._run_sync(self.run(name), "run(...)")

    # -- all of them -------------------------------------------------------------------------------------------------

    @exact_options
    async def sync(self, entries: Mapping[str, Schedule], *, set: str = "default") -> None:  # noqa: A002
        """Make the schedules of a set those of `entries`. A schedule that is equal is not changed.

        What an earlier `sync` of the same set has put and `entries` does not have is removed. Schedules of the code, of
        `put` and of other sets stay. If the call does not end, repeat it: it puts first and removes afterwards.

        Args:
            entries: The schedules by name.
            set: The name of the set.

        Raises:
            UsageError: An entry is not valid, or the code defines a schedule with its name. Nothing is changed.
        """
        set_name = check_text("set", set)
        wanted = {name: self._definition(name, schedule, set_name) for name, schedule in _entries(entries).items()}
        backend = await self._backend()
        present = await self._read(backend)
        same = {one.definition.name for one in present if wanted.get(one.definition.name) == one.definition}
        for name, definition in wanted.items():
            if name not in same:
                await self._put(backend, definition)
        for one in present:
            if one.definition.set_name == set_name and one.definition.name not in wanted:
                await remove_schedule(backend, one)

    def sync_sync(self, entries: Mapping[str, Schedule], *, set: str = "default") -> None:  # noqa: A002
        """Make the schedules of a set those of `entries`, from code without an event loop. See `sync`."""
        self._run_sync(self.sync(entries, set=set), "sync(...)")

    async def list(self) -> builtins.list[ScheduleStatus]:
        """Return all schedules of the app's queues, by name.

        A schedule of the code is there when a worker has started with it.
        """
        backend = await self._backend()
        present = sorted(newest(await self._read(backend)), key=lambda one: one.definition.name)
        return await status_of(backend, present, self._tasks.clock.time())

    def list_sync(self) -> builtins.list[ScheduleStatus]:
        """Return all schedules from code without an event loop. See `list`."""
        return self._run_sync(self.list(), "list()")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run_sync(self, coroutine: Coroutine[Any, Any, R], call: str) -> R:
        run = self._tasks._run_sync  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return run(coroutine, instead=f"`await tasks.schedules.{call}`")

    async def _backend(self) -> Backend:
        backend = await self._tasks.backend()
        check_deviations(backend.describe().partition(":")[0], backend.deviations)
        return backend

    def _refuse_code(self, name: str, advice: str) -> None:
        if name in self.in_code:
            raise UsageError(f"schedule {name!r} is defined in code: {advice}")

    def _definition(self, name: str, schedule: Schedule, set_name: str | None) -> Definition:
        self._refuse_code(name, "use another name")
        with naming_schedule(name):
            definition = definition_of(check_name(name), schedule, set_name=set_name)
        if definition.queue not in self._tasks.queue_names():
            raise UsageError(
                f"schedule {name!r}: no task of this app has the queue {definition.queue!r}, so no worker looks for"
                " schedules there: register a task with it"
            )
        return definition

    async def _put(self, backend: Backend, definition: Definition) -> None:
        # Its first tick follows this time, by which the workers count.
        now = await store_time(backend, definition.queue, self._tasks.clock)
        with naming_schedule(definition.name):
            await put_definition(backend, definition, now)
        # The call may have had another queue before.
        for queue in self._tasks.queue_names():
            if queue != definition.queue:
                stored = await find_schedule(backend, [queue], definition.name, now)
                if stored is not None:
                    await remove_schedule(backend, stored)

    async def _read(self, backend: Backend) -> builtins.list[StoredSchedule]:
        now = self._tasks.clock.time()
        return [one for queue in self._tasks.queue_names() for one in await read_schedules(backend, queue, now)]

    async def _find(self, backend: Backend, name: str) -> StoredSchedule | None:
        return await find_schedule(backend, self._tasks.queue_names(), name, self._tasks.clock.time())

    async def _definition_of(self, backend: Backend, name: str) -> Definition:
        """Return the definition by which workers tick.

        Raises:
            UsageError: There is no such schedule.
        """
        stored = await self._find(backend, name)
        if stored is not None:
            return stored.definition
        if name in self.in_code:
            return self.in_code[name].definition
        raise UsageError(f"there is no schedule {shown(name)}: tasks.schedules.list() names them")

    async def _set_paused(self, name: str, *, paused: bool) -> None:
        backend = await self._backend()
        definition = await self._definition_of(backend, name)
        await set_paused(backend, definition.queue, name, paused=paused)


def _entries(entries: object) -> Mapping[str, Schedule]:
    if not isinstance(entries, Mapping):
        raise UsageError(f"sync() takes a dict of schedules by name (got {shown(entries)})")
    given = cast("Mapping[str, object]", entries)
    for name, schedule in given.items():
        if not isinstance(schedule, Schedule):
            raise UsageError(f"schedule {shown(name)}: it must be a Schedule(call, cron=...) (got {shown(schedule)})")
    return cast("Mapping[str, Schedule]", given)


async def run_now(backend: Backend, definition: Definition, now: float) -> str:
    """Enqueue one call of a schedule now, out of turn, and return the message's id."""
    (message_id,) = await backend.publish(definition.queue, [definition.draft(None, now)])
    return message_id
