"""The pages: what each of them shows, from the sampler and from reads with a budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from markupsafe import Markup

from qworker.app import Tasks
from qworker.backend.listing import list_messages
from qworker.charts import Series, line_chart, sparkline
from qworker.clock import Clock
from qworker.errors import UsageError
from qworker.failure_text import summary
from qworker.failures.groups import FailureGroup, GroupCounts, task_of
from qworker.history.event import Event
from qworker.message import STATE_WORDS, Query, QueueStats, State, StoredMessage
from qworker.names import id_forms
from qworker.sampling import QueueSnapshot, RingSample
from qworker.sampling.ring import LEVELS
from qworker.schedules.store import ScheduleStatus, read_statuses
from qworker.tools.explain import Explanation, explain
from qworker.ui.access import Access
from qworker.ui.looks import Look
from qworker.ui.problems import Problem, problems_of
from qworker.ui.reads import MOST_FAILURES, FoundGroup, Place, find_everywhere, read_group, read_groups
from qworker.ui.text import DASH, arguments_of, body_of, duration, number, rate
from qworker.ui.watch import Seen, Watch

__all__ = ["NoSuchPage", "Pages", "Unreachable"]

# Rows of one page.
_MOST_QUEUES, _MOST_MESSAGES, _MOST_GROUPS = 100, 50, 100
# Ready messages above which a list of them shows only the ids that the sampler has seen.
_LISTED = 50_000
# Seconds above which the age of a number is shown.
_FRESH_S = 4.0
# The time from one point of a chart to the next, and how far it reaches, by the names in the URL.
_RANGES = {"1h": 0, "24h": 1, "7d": 2}
# Points of a sparkline: an hour, each point for a minute.
_SPARK_POINTS, _SPARK_STEP = 60, 60.0
_Value = Callable[[RingSample], float | None]
_NO_HISTORY = "the workers of this store keep no history: add ?history=1 to their URL"


class NoSuchPage(Exception):
    """The page's queue or message does not exist."""


class Unreachable(Exception):
    """The store cannot be asked now."""


class Pages:
    """The content of the pages, by the names that the templates use.

    Args:
        watch: The source of all numbers.
        clock: The clock.
        tasks: The app, which can say more about a message. None: it is not known.
    """

    def __init__(self, watch: Watch, clock: Clock, tasks: Tasks | None) -> None:
        self._watch = watch
        self._clock = clock
        self._tasks = tasks

    # -- the overview --------------------------------------------------------------------------------------------------

    async def overview(self, wanted: str, page: int) -> dict[str, Any]:
        """Return the problems and a page of the queues, those with problems first.

        Args:
            wanted: A part of the queues' names.
            page: The number of the page, from 0.
        """
        seen = await self._watch.see()
        now = self._clock.time()
        every = [] if seen.snapshot is None else seen.snapshot.queues
        found = [one for one in every if wanted.lower() in one.queue.lower()]
        # The past is read for the rows of one page. So the order is by what the last sample says alone.
        found.sort(key=partial(_trouble, seen, now))
        shown = found[page * _MOST_QUEUES : (page + 1) * _MOST_QUEUES]
        rows = [await self._row(seen, one, now) for one in shown]
        return {
            "seen": seen,
            "wanted": wanted,
            "page": page,
            "pages": max(1, -(-len(found) // _MOST_QUEUES)),
            "total": len(every),
            "rows": rows,
            "problems": [problem for row in rows for problem in row["problems"]],
            "has_flow": not every or any(one.flow is not None for one in every),
        }

    async def _row(self, seen: Seen, one: QueueSnapshot, now: float) -> dict[str, Any]:
        past = await self._watch.past(one.queue, 0)
        problems = problems_of(one, past, seen.unworked.get(one.queue), now)
        return {**_numbers(one, now), "problems": problems, "spark": _spark(past, now), **_status(one, problems)}

    # -- a queue -------------------------------------------------------------------------------------------------------

    async def queue(
        self, name: str, access: Access, *, state: str, newest: bool, after: str | None, span: str
    ) -> dict[str, Any]:
        """Return the numbers, charts and one list of messages of a queue.

        Raises:
            NoSuchPage: The queue does not exist.
            UsageError: The state or the range is not known.
        """
        chosen, level = State.of_word(state), _RANGES.get(span)
        if level is None:
            raise UsageError(f"the range must be one of {', '.join(_RANGES)}")
        seen = await self._watch.see()
        one = self._known(seen, name)
        now = self._clock.time()
        past = await self._watch.past(name, level)
        recent = past if level == 0 else await self._watch.past(name, 0)
        listed = await self._list(one, chosen, newest, after)
        problems = problems_of(one, recent, seen.unworked.get(name), now)
        numbers = _numbers(one, now)
        return {
            "seen": seen,
            **numbers,
            **_status(one, problems),
            "problems": problems,
            "charts": _charts(past, level, now),
            "span": span,
            "spans": list(_RANGES),
            "tasks": _tasks(one),
            "state": state,
            "states": _tabs(numbers["stats"]),
            "newest": newest,
            "after": after,
            **_listing(listed, access, now),
            "ids": [] if listed is not None else _ids(one, newest),
        }

    def _known(self, seen: Seen, name: str) -> QueueSnapshot:
        one = seen.queue(name)
        if one is None:
            if seen.problem is not None:
                raise Unreachable(seen.problem)
            raise NoSuchPage(f"there is no queue {name} in {seen.store}")
        return one

    async def _list(
        self, one: QueueSnapshot, state: State, newest: bool, after: str | None
    ) -> Look[list[StoredMessage]] | None:
        """Return a list of messages. None: the queue is so deep that the list would cost too much."""
        if one.counted is not None:
            count = one.counted.count
            if state is State.READY and count.stats.ready > _LISTED and count.first:
                return None
        query = Query(state, after=after, limit=_MOST_MESSAGES + 1, newest=newest)

        async def read() -> list[StoredMessage]:
            return await list_messages(await self._watch.backend(), one.queue, query)

        return await self._watch.looks.look(("list", one.queue, query), read)

    # -- a message -----------------------------------------------------------------------------------------------------

    async def message(self, queue: str, message_id: str, access: Access) -> dict[str, Any]:
        """Return what is known about a message.

        Raises:
            NoSuchPage: Neither the store nor its history knows it.
        """
        seen = await self._watch.see()
        look = await self._explained(queue, message_id)
        found = look.value
        if found is None:
            return {"seen": seen, "look": look, "queue": queue, "id": message_id, "found": None}
        stored = found.stored
        message = None if stored is None else stored.message
        return {
            "seen": seen,
            "look": look,
            "queue": queue,
            "id": found.id,
            "found": found,
            "message": message,
            "task": _task(found),
            "state": "gone" if found.state is None else found.state.word,
            "facts": [] if stored is None else _facts(stored),
            "story": _story(found.history),
            "body": None if message is None else body_of(message, masked=not access.sees_secrets),
            "masked": not access.sees_secrets,
            "headline": None if found.error is None else summary(found.error),
        }

    async def _explained(self, queue: str, message_id: str) -> Look[Explanation]:
        async def read() -> Explanation:
            backend = await self._watch.backend()
            return await explain(backend, queue, message_id, self._tasks, self._clock)

        look = await self._watch.looks.look(("message", queue, message_id), read)
        if look.missing:
            raise NoSuchPage(look.problem)
        if look.value is not None and look.value.state is None and not look.value.history:
            raise NoSuchPage(look.value.reasons[0].text)
        return look

    async def body(self, queue: str, message_id: str) -> bytes:
        """Return the body of a message.

        Raises:
            NoSuchPage: It is not stored.
            BackendError: The store cannot be asked.
        """
        backend = await self._watch.backend()
        found = await backend.find(queue, id_forms(message_id))
        if not found:
            raise NoSuchPage(f"{queue} has no message with this id")
        return found[0].message.body

    # -- search, failures, schedules -----------------------------------------------------------------------------------

    async def find(self, message_id: str) -> dict[str, Any]:
        """Return the queues that have a message."""
        seen = await self._watch.see()
        if not message_id:
            return {"seen": seen, "id": message_id, "places": [], "unknown": [], "queues": []}
        queues = _names(seen)

        async def search() -> tuple[list[Place], list[str]]:
            return await find_everywhere(await self._watch.backend(), queues, message_id)

        look = await self._watch.looks.look(("find", message_id), search)
        if look.value is None:
            raise Unreachable(look.problem or "the search takes long: try again in a moment")
        places, unknown = look.value
        return {"seen": seen, "id": message_id, "places": places, "unknown": unknown, "queues": queues}

    async def failures(self) -> dict[str, Any]:
        """Return the groups of failed messages of all queues, the largest first."""
        seen = await self._watch.see()
        queues = [name for name in _names(seen) if _failed(seen.queue(name))]
        looks = await asyncio.gather(*map(self._groups, queues))
        rows: dict[str, _GroupRow] = {}
        for queue, look in zip(queues, looks, strict=True):
            for counts in look.value or ():
                key = "" if counts.group is None else counts.group.key
                rows.setdefault(key, _GroupRow(counts.group)).add(queue, counts)
        return {
            "seen": seen,
            "rows": sorted(rows.values(), key=lambda row: -row.count)[:_MOST_GROUPS],
            "more": max(0, len(rows) - _MOST_GROUPS),
            "reading": [queue for queue, look in zip(queues, looks, strict=True) if look.at is None],
            "problems": {queue: look.problem for queue, look in zip(queues, looks, strict=True) if look.problem},
            "cut": [queue for queue in queues if _failed(seen.queue(queue)) > MOST_FAILURES],
            "most": MOST_FAILURES,
            "now": self._clock.time(),
        }

    async def _groups(self, queue: str) -> Look[list[GroupCounts]]:
        async def read() -> list[GroupCounts]:
            return await read_groups(await self._watch.backend(), queue)

        return await self._watch.looks.look(("failures", queue), read)

    async def group(self, queue: str, key: str, access: Access) -> dict[str, Any]:
        """Return the messages of one group in one queue.

        Raises:
            NoSuchPage: It has none.
        """
        seen = await self._watch.see()
        self._known(seen, queue)

        async def read() -> FoundGroup:
            return await read_group(await self._watch.backend(), queue, key)

        look = await self._watch.looks.look(("group", queue, key), read)
        found = look.value
        if found is not None and found.group is None:
            raise NoSuchPage(f"{queue} has no failed message of this group any more")
        now = self._clock.time()
        rows = [] if found is None else [_message_row(stored, access, now) for stored in found.newest]
        last = found.newest[0].error if found is not None and found.newest else None
        return {"seen": seen, "queue": queue, "look": look, "found": found, "messages": rows, "last": last}

    async def schedules(self) -> dict[str, Any]:
        """Return the schedules of all queues."""
        seen = await self._watch.see()
        queues = [name for name in _names(seen) if not _problem(seen.queue(name))]

        async def read() -> list[ScheduleStatus]:
            return await read_statuses(await self._watch.backend(), queues, self._clock.time())

        look: Look[list[ScheduleStatus]] = Look(None, [])
        if seen.has_schedules:
            look = await self._watch.looks.look("schedules", read)
        return {"seen": seen, "look": look, "rows": look.value or []}


# -- rows --------------------------------------------------------------------------------------------------------------


def _names(seen: Seen) -> list[str]:
    return [] if seen.snapshot is None else [one.queue for one in seen.snapshot.queues]


def _failed(one: QueueSnapshot | None) -> int:
    return 0 if one is None or one.counted is None else one.counted.count.stats.failed


def _problem(one: QueueSnapshot | None) -> str | None:
    return None if one is None else one.problem


class _GroupRow(msgspec.Struct):
    """One group in all queues."""

    group: FailureGroup | None
    count: int = 0
    first_at: float | None = None
    last_at: float | None = None
    # The number of messages in each queue.
    queues: dict[str, int] = {}

    def add(self, queue: str, counts: GroupCounts) -> None:
        """Add what one queue has."""
        self.count += counts.count
        self.queues[queue] = counts.count
        times = [at for at in (self.first_at, counts.first_at) if at is not None]
        self.first_at = min(times, default=None)
        self.last_at = max([at for at in (self.last_at, counts.last_at) if at is not None], default=None)


def _numbers(one: QueueSnapshot, now: float) -> dict[str, Any]:
    stats = None if one.counted is None else one.counted.stats_at(now)
    flow = one.flow
    age = None if one.counted is None else now - one.counted.at
    return {
        "queue": one.queue,
        "stats": stats,
        "exact": one.counted is None or one.counted.exact,
        "age": age if age is not None and age > _FRESH_S else None,
        "flow": flow,
        "growth": None if one.counted is None else rate(one.counted.backlog_rate, signed=True),
        "acked": rate(flow.acked) if flow else DASH,
        "failures": rate(flow.failed) if flow else DASH,
        "retries": rate(flow.retried) if flow else DASH,
        "wait": duration(flow.wait.p95) if flow and flow.wait else DASH,
        "run": duration(flow.run.p95) if flow and flow.run else DASH,
        "workers": number(flow.workers) if flow else DASH,
        "oldest": duration(None if stats is None else stats.oldest_age_s),
        "empty_in": _time_to_empty(one),
        "no_history": _NO_HISTORY,
    }


def _time_to_empty(one: QueueSnapshot) -> str:
    if one.counted is None or one.counted.backlog_rate is None or one.counted.backlog_rate > -0.05:
        return DASH
    stats = one.counted.count.stats
    return duration((stats.ready + stats.leased) / -one.counted.backlog_rate)


def _trouble(seen: Seen, now: float, one: QueueSnapshot) -> tuple[bool, int, str]:
    """Return the place of a queue in the overview: first those with problems, then those with the most waiting."""
    problems = problems_of(one, (), seen.unworked.get(one.queue), now)
    return not problems, 0 if one.counted is None else -one.counted.count.stats.ready, one.queue


def _status(one: QueueSnapshot, problems: Sequence[Problem]) -> dict[str, str]:
    """Return the word for a queue, and its kind, which has a colour."""
    stats = None if one.counted is None else one.counted.count.stats
    if one.problem is not None:
        return {"status": "Unusable", "kind": "bad"}
    if stats is None:
        return {"status": "Counting…", "kind": "calm"}
    if stats.paused:
        return {"status": "Paused", "kind": "warn"}
    if any(problem.text.startswith("no worker") for problem in problems):
        return {"status": "No worker", "kind": "bad"}
    if problems:
        return {"status": "Trouble", "kind": "bad"}
    is_active = stats.leased or (one.flow is not None and one.flow.acked)
    return {"status": "Active", "kind": "good"} if is_active else {"status": "Idle", "kind": "calm"}


def _spark(past: Sequence[RingSample], now: float) -> Markup | None:
    """Draw the waiting messages of the last hour. A minute without a sample is a gap."""
    end = now // _SPARK_STEP + 1
    values: list[float | None] = [None] * _SPARK_POINTS
    for sample in past:
        place = int(sample.at // _SPARK_STEP - end + _SPARK_POINTS)
        if 0 <= place < _SPARK_POINTS:
            values[place] = max(values[place] or 0.0, float(sample.ready))
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return sparkline(f"waiting in the last hour: now {known[-1]:,.0f}, at most {max(known):,.0f}", values)


def _charts(past: Sequence[RingSample], level: int, now: float) -> list[Markup]:
    """Draw what was sampled. A period without a sample is a gap."""
    if len(past) < 2:
        return []
    step = LEVELS[level].step
    begin, end = past[0].at, LEVELS[level].start(now)
    samples: list[RingSample | None] = [None] * (int((end - begin) // step) + 1)
    for sample in past:
        samples[min(len(samples) - 1, int((sample.at - begin) // step))] = sample
    times = [begin + step * i for i in range(len(samples))]

    def chart(name: str, unit: Callable[[float], str], lines: Mapping[str, _Value]) -> Markup:
        series = [
            Series(word, [None if one is None else value(one) for one in samples]) for word, value in lines.items()
        ]
        return line_chart(name, times, series, unit)

    return [
        chart("Messages", _short, {"waiting": lambda one: one.ready, "running": lambda one: one.leased}),
        chart(
            "Finished per second",
            _short,
            {
                "done": lambda one: one.acked / step,
                "retried": lambda one: one.retried / step,
                "failed": lambda one: one.failures / step,
            },
        ),
        chart(
            "Wait and run time, 95 %",
            duration,
            {
                "wait": lambda one: None if one.wait is None else one.wait.p95,
                "run": lambda one: None if one.run is None else one.run.p95,
            },
        ),
    ]


def _short(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _tasks(one: QueueSnapshot) -> list[dict[str, str]]:
    waiting = {} if one.counted is None else one.counted.count.tasks
    names = sorted({*one.tasks, *waiting})
    rows: list[dict[str, str]] = []
    for name in names:
        flow = one.tasks.get(name)
        rows.append(
            {
                "task": name or "(no task)",
                "waiting": number(waiting.get(name)) if waiting else DASH,
                "acked": rate(flow.acked) if flow else DASH,
                "retries": rate(flow.retried) if flow else DASH,
                "failures": rate(flow.failed) if flow else DASH,
                "run": duration(flow.run.p95) if flow and flow.run else DASH,
            }
        )
    return rows


def _tabs(stats: QueueStats | None) -> list[tuple[str, str, int | None]]:
    """Return the states, each with its heading and count."""
    words = {"ready": "Waiting", "leased": "Running", "delayed": "Delayed", "failed": "Failed", "done": "Done"}
    return [(word, words[word], None if stats is None else getattr(stats, word)) for word in STATE_WORDS.values()]


def _listing(look: Look[list[StoredMessage]] | None, access: Access, now: float) -> dict[str, Any]:
    if look is None:
        return {"look": None, "messages": [], "following": None, "list_age": None}
    found = look.value or []
    shown = found[:_MOST_MESSAGES]
    rows = [_message_row(stored, access, now) for stored in shown]
    following = shown[-1].position if len(found) > _MOST_MESSAGES else None
    age = None if look.at is None or now - look.at <= _FRESH_S else now - look.at
    return {"look": look, "messages": rows, "following": following, "list_age": age}


def _message_row(stored: StoredMessage, access: Access, now: float) -> dict[str, Any]:
    message = stored.message
    return {
        "id": message.id,
        "task": task_of(message) or "(raw)",
        "tries": message.tries,
        "note": _note(stored, now),
        "arguments": arguments_of(message, masked=not access.sees_secrets),
        "error": summary(stored.error) if stored.error else None,
    }


def _note(stored: StoredMessage, now: float) -> str:
    """Return the time that matters in a state."""
    match stored.state:
        case State.READY:
            return duration(max(0.0, now - stored.message.enqueued_at)) if stored.message.enqueued_at else DASH
        case State.DELAYED:
            return f"in {duration(max(0.0, stored.due_at - now))}" if stored.due_at is not None else DASH
        case State.LEASED:
            return stored.holder or "another process"
        case _:
            return f"{duration(max(0.0, now - stored.finished_at))} ago" if stored.finished_at is not None else DASH


def _ids(one: QueueSnapshot, newest: bool) -> list[str]:
    if one.counted is None:
        return []
    return one.counted.count.last if newest else one.counted.count.first


# -- the story of a message --------------------------------------------------------------------------------------------


def _task(found: Explanation) -> str | None:
    if found.stored is not None:
        return task_of(found.stored.message)
    return next((event.task for event in reversed(found.history) if event.task), None)


class _Step(msgspec.Struct, frozen=True):
    """One line of a story, with the kind that has a colour. `count` events of the same kind are one line."""

    at: float
    words: str
    kind: Literal["good", "bad", "warn", "calm"]
    error: str | None = None
    count: int = 1


_KINDS: dict[str, Literal["good", "bad", "warn", "calm"]] = {
    "acked": "good",
    "failed": "bad",
    "cancelled": "bad",
    "lost": "bad",
    "retried": "warn",
}


def _story(events: Sequence[Event]) -> list[_Step]:
    """Return the events as lines. A long task is extended many times, which is one line."""
    steps: list[_Step] = []
    for event in events:
        step = _Step(event.at, _words(event), _KINDS.get(event.kind, "calm"), event.error)
        if steps and event.kind == "extended" and steps[-1].words == step.words:
            step = msgspec.structs.replace(step, count=steps[-1].count + 1)
            steps.pop()
        steps.append(step)
    return steps


def _words(event: Event) -> str:
    ran = "" if event.duration_s is None else f" after {duration(event.duration_s)}"
    by = "" if event.kind == "enqueued" else f" by {event.worker}"
    return f"{event.kind}{ran}{by}"


def _facts(stored: StoredMessage) -> list[tuple[str, Any, str]]:
    """Return what the store keeps about a message: a name, the value, and how it is shown."""
    message = stored.message
    facts = [
        ("enqueued", message.enqueued_at or None, "time"),
        ("due", stored.due_at, "time"),
        ("leased by", stored.holder, "text"),
        ("lease expires", stored.expires_at, "time"),
        ("finished", stored.finished_at, "time"),
        ("tries", message.tries, "text"),
        ("priority", message.priority or None, "text"),
        ("unique key", message.unique_key, "text"),
        ("original id", message.original_id, "text"),
        ("deaths in a row", message.deaths or None, "text"),
        ("arguments", " ".join(message.argv) or None if task_of(message) is None else None, "text"),
    ]
    return [fact for fact in facts if fact[1] is not None]
