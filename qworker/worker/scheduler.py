"""The scheduler: enqueues the calls of schedules at their ticks.

Every worker of an app has this loop, for all queues of the app. No worker leads: the id of a tick's message is the same
in all of them, and it is stored once. An app without schedules costs one look for new ones every few seconds.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from qworker import log_events as events
from qworker.backend.each_queue import can_be_of_one_queue
from qworker.backend.offers import queues_with_cells
from qworker.errors import UsageError
from qworker.schedules.catch_up import ON_TIME
from qworker.schedules.records import GROUP, Definition
from qworker.schedules.registration import REFRESHED, forward, register
from qworker.schedules.store import StoredSchedule, newest, read_schedules
from qworker.schedules.ticking import Look, look_at, tick
from qworker.worker.outage import BACKEND_ERRORS
from qworker.worker.state import WorkerState

__all__ = ["Scheduler"]

# Seconds of the longest pause: a step of the clock is seen after it.
_LONGEST_PAUSE = 1.0
# Seconds between two looks for new and changed schedules. A look that takes long is repeated less often, so that it
# takes at most a hundredth of the time.
_LOOK_EVERY = 5.0
_LOOK_SHARE = 100.0
_LOOK_AT_MOST = 60.0
# Seconds until a paused schedule, or one whose records cannot be used, is looked at again.
_AGAIN = 2.0
# Seconds after which a burst does not wait any longer for the first answer of the store.
_FIRST_ANSWER = 10.0
# The random seconds by which a tick is later, so that not all workers ask the store at once.
_JITTER = 0.05


@dataclass(slots=True)
class _Entry:
    """A schedule that ticks here."""

    definition: Definition
    # Store's time at which it is looked at next.
    due: float
    # Store's time at which its last pause ended.
    resumed: float = 0.0
    paused: bool = False


class Scheduler:
    """Ticks until it is cancelled.

    Attributes:
        begun: Set after the first round, or when a burst must not wait for it any longer.
    """

    def __init__(self, state: WorkerState) -> None:
        self._backend = state.backend
        self._schedules = state.app.schedules
        self._features = state.features
        self._queues = sorted({*state.app.queue_names(), *state.queues})
        self._clock = state.clock
        self._store = state.store_clock
        self._started = state.options.started
        self._draw = state.draw
        self._log = state.log
        self._outage = state.outage("scheduler")
        self.begun = asyncio.Event()
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[float, str]] = []
        # Monotonic seconds of the next look, and of the last refresh of the definitions in the code.
        self._look_due = 0.0
        self._refreshed = 0.0
        # The rank of the definitions in the code.
        self._rank: int | None = None
        # The store's time and the monotonic time of the last round, and the store's time since when ticks were not
        # missed.
        self._seen: tuple[float, float] | None = None
        self._awake = 0.0
        self._warned: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Tick until cancelled."""
        await self._wait_for_time()
        while True:
            pause = await self._round()
            self.begun.set()
            await asyncio.sleep(pause)

    async def _wait_for_time(self) -> None:
        """Wait until the store's time is known: a host whose clock is wrong must not tick ahead."""
        try:
            async with asyncio.timeout(_FIRST_ANSWER):
                await self._store.known.wait()
        except TimeoutError:
            self.begun.set()
            await self._store.known.wait()

    async def _round(self) -> float:
        self._note_step()
        trouble: Exception | None = None
        try:
            if self._clock.monotonic() >= self._look_due:
                trouble = await self._look()
            trouble = await self._tick_due() or trouble
        except BACKEND_ERRORS as error:
            trouble = error
        if trouble is not None:
            return self._outage.record_failure(trouble)
        self._outage.record_success()
        return self._pause()

    def _pause(self) -> float:
        pause = self._look_due - self._clock.monotonic()
        if self._heap:
            pause = min(pause, _LONGEST_PAUSE, self._heap[0][0] - self._store.time())
        return max(pause, 0.0)

    def _note_step(self) -> None:
        """Note a step of the store's clock. After a long one, ticks were missed, or the next ones are others."""
        now, monotonic = self._store.time(), self._store.monotonic()
        if self._seen is None:
            self._awake = now
            started = monotonic if self._started is None else self._started
            self._rank = int((now - (monotonic - started)) * 1000)
        else:
            step = (now - self._seen[0]) - (monotonic - self._seen[1])
            if abs(step) > ON_TIME:
                self._awake = now
                for entry in self._entries.values():
                    self._push(entry, now)
        self._seen = now, monotonic

    # -- the schedules -----------------------------------------------------------------------------------------------

    async def _look(self) -> Exception | None:
        """Read the schedules of all queues, and register those of the code. Return the error of a single queue."""
        began = self._clock.monotonic()
        now = self._store.time()
        found: list[StoredSchedule] = []
        trouble: Exception | None = None
        unread: set[str] = set()
        for queue in await queues_with_cells(self._backend, self._queues, GROUP):
            # A look at a queue without cells may suspend nowhere.
            await asyncio.sleep(0)
            try:
                found += await read_schedules(self._backend, queue, now)
            except BACKEND_ERRORS as error:
                trouble = self._of_one_queue(error)
                unread.add(queue)
        current = {one.definition.name: one.definition for one in newest(found)}
        try:
            current |= await self._register(found, unread, now)
        except BACKEND_ERRORS as error:
            trouble = self._of_one_queue(error)
        self._adopt(current, unread, now)
        took = self._clock.monotonic() - began
        self._look_due = began + min(max(_LOOK_EVERY, _LOOK_SHARE * took), _LOOK_AT_MOST)
        return trouble

    def _of_one_queue(self, error: Exception) -> Exception:
        if not can_be_of_one_queue(self._backend, error):
            raise error
        return error

    async def _register(self, found: Iterable[StoredSchedule], unread: set[str], now: float) -> dict[str, Definition]:
        """Register the schedules of the code. Return the definitions that count."""
        current: dict[str, Definition] = {}
        assert self._rank is not None
        refresh = self._clock.monotonic() - self._refreshed >= REFRESHED
        by_name: dict[str, list[StoredSchedule]] = {}
        for one in found:
            by_name.setdefault(one.definition.name, []).append(one)
        since = self._schedules.since
        for name, code in self._schedules.in_code.items():
            own = code.definition
            if own.queue in unread:
                continue
            stored = by_name.get(name, [])
            at_home = next((one.cell for one in stored if one.home == own.queue), None)
            definition = await register(
                self._backend, own, at_home, self._rank, since=now if since is None else since, refresh=refresh
            )
            if definition == own:
                for one in stored:
                    if one.definition != own and one.home != own.queue and one.cell.rank < self._rank:
                        await forward(self._backend, own, one.home, one.cell, self._rank)
            if definition is not None:
                self._report_superseded(own, definition)
                current[name] = definition
        if refresh:
            self._refreshed = self._clock.monotonic()
        return current

    def _report_superseded(self, own: Definition, definition: Definition) -> None:
        if definition != own and self._is_first("superseded", own.name):
            self._log.warning(
                events.SCHEDULE_SUPERSEDED, schedule=own.name, definition=own.text, ticks_by=definition.text
            )

    def _is_first(self, what: str, name: str) -> bool:
        if (what, name) in self._warned:
            return False
        self._warned.add((what, name))
        return True

    def _adopt(self, current: dict[str, Definition], unread: set[str], now: float) -> None:
        for name, entry in list(self._entries.items()):
            if name not in current and entry.definition.queue not in unread:
                del self._entries[name]
        for name, definition in current.items():
            known = self._entries.get(name)
            if known is None:
                # The first look at its records finds the ticks that were missed.
                known = self._entries[name] = _Entry(definition, now)
            elif known.definition == definition:
                continue
            known.definition = definition
            self._push(known, now)

    def _push(self, entry: _Entry, due: float) -> None:
        entry.due = due
        heapq.heappush(self._heap, (due, entry.definition.name))

    # -- ticks -------------------------------------------------------------------------------------------------------

    async def _tick_due(self) -> Exception | None:
        """Tick what is due. Return the error of a single queue."""
        trouble: Exception | None = None
        while self._heap and self._heap[0][0] <= (now := self._store.time()):
            due, name = heapq.heappop(self._heap)
            entry = self._entries.get(name)
            if entry is None or entry.due != due:
                # It was removed, or has another due time by now.
                continue
            # Before the store is called: an error must not lose it.
            self._push(entry, now + _AGAIN)
            try:
                await self._tick(entry, now)
            except BACKEND_ERRORS as error:
                trouble = self._of_one_queue(error)
            except UsageError as error:
                if self._is_first("unusable", name):
                    self._log.error(events.SCHEDULE_UNUSABLE, schedule=name, error=str(error))
        return trouble

    async def _tick(self, entry: _Entry, now: float) -> None:
        definition = entry.definition
        look = await look_at(self._backend, definition.queue, definition.name)
        if look.definition is None or look.definition.queue != definition.queue:
            # It was removed, has expired, or has moved: the next look sorts it out.
            if look.absent:
                del self._entries[definition.name]
            self._look_due = 0.0
            return
        if look.definition != definition:
            self._report_own_superseded(look.definition)
            definition = entry.definition = look.definition
        if look.paused:
            entry.paused = True
            return
        if entry.paused:
            entry.paused, entry.resumed = False, now
        await self._enqueue(entry, look, now)

    def _report_own_superseded(self, definition: Definition) -> None:
        code = self._schedules.in_code.get(definition.name)
        if code is not None:
            self._report_superseded(code.definition, definition)

    async def _enqueue(self, entry: _Entry, look: Look, now: float) -> None:
        definition = entry.definition
        since = self._schedules.since if definition.in_code and self._schedules.since is not None else now
        ticked = await tick(
            self._backend, definition, look, since=since, awake=self._awake, resumed=entry.resumed, now=now
        )
        missed = len(ticked.passed) - len(ticked.enqueued)
        if ticked.first:
            self._count(definition, enqueued=len(ticked.enqueued), missed=missed)
        if missed:
            self._log.info(events.TICKS_MISSED, schedule=definition.name, missed=missed, enqueued=len(ticked.enqueued))
        upcoming = next(definition.timetable.after(max(now, ticked.last)), None)
        if upcoming is not None:
            self._push(entry, upcoming + _JITTER * self._draw())

    def _count(self, definition: Definition, **outcomes: int) -> None:
        for outcome, count in outcomes.items():
            if count:
                self._features.add("ticks", outcome, definition.queue, count=count)
