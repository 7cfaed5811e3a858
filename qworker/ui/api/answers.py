"""The answers of the API. Each has the data of one page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from qworker.asgi.interface import get_number
from qworker.message import StoredMessage
from qworker.sampling import QueueSnapshot, RingSample
from qworker.sampling.ring import LEVELS
from qworker.ui.access import Access
from qworker.ui.api.schemas import (
    ActionList,
    EventPage,
    FoundPlaces,
    GroupMessages,
    MessageDetail,
    MessagePage,
    PlaceItem,
    QueueDetail,
    QueueItem,
    QueuePage,
    SamplePage,
    ScheduleList,
    TaskItem,
)
from qworker.ui.pages.activity import find_actions, find_events
from qworker.ui.pages.failures import FoundFailures, find_failures, find_group
from qworker.ui.pages.find import find_places
from qworker.ui.pages.lists import ListQuery, read_list
from qworker.ui.pages.message import find_message
from qworker.ui.pages.queue import level_of
from qworker.ui.pages.rows import status_of, time_to_empty
from qworker.ui.pages.schedules import find_schedules
from qworker.ui.pages.source import Source, known_queue, value_of
from qworker.ui.pages.workers import FoundWorkers, find_workers
from qworker.ui.problems import problems_of
from qworker.ui.text import text_json_of
from qworker.ui.watch import Seen

__all__ = [
    "actions",
    "activity",
    "failures",
    "find",
    "group",
    "message",
    "messages",
    "queue",
    "queues",
    "samples",
    "schedules",
    "workers",
]

# The largest number of rows of one answer.
_MOST = 1000


async def queues(source: Source, request: Request) -> QueuePage:
    """Return the queues by name."""
    asked = request.query_params
    limit, part, after = _limit(asked, 100), asked.get("name", "").lower(), asked.get("after", "")
    seen = await source.watch.see()
    found = [one for one in seen.queues if part in one.queue.lower() and one.queue > after]
    return QueuePage(
        store=seen.store,
        sampled_at=seen.sampled_at,
        problem=seen.problem,
        queues=[await _item(source, seen, one) for one in found[:limit]],
        next=found[limit - 1].queue if len(found) > limit else None,
    )


async def queue(source: Source, request: Request) -> QueueDetail:
    """Return one queue and its tasks."""
    seen = await source.watch.see()
    one = known_queue(seen, request.path_params["queue"])
    waiting = {} if one.counted is None else one.counted.count.tasks
    return QueueDetail(
        store=seen.store,
        sampled_at=seen.sampled_at,
        problem=seen.problem,
        queue=await _item(source, seen, one),
        tasks=[
            TaskItem(task=name, ready=waiting.get(name, 0) if waiting else None, flow=one.tasks.get(name))
            for name in sorted({*waiting, *one.tasks})
        ],
    )


async def samples(source: Source, request: Request) -> SamplePage:
    """Return what was sampled of a queue, for charts."""
    level = level_of(request.query_params)
    one = known_queue(await source.watch.see(), request.path_params["queue"])
    past: Sequence[RingSample] = await source.watch.past(one.queue, level)
    return SamplePage(queue=one.queue, step_s=LEVELS[level].step, samples=list(past))


async def messages(source: Source, request: Request) -> MessagePage:
    """Return messages of one state, or those that match a filter."""
    asked, access = request.query_params, request.state.access
    wanted, limit = ListQuery.of(asked), _limit(asked, 50)
    one = known_queue(await source.watch.see(), request.path_params["queue"])
    found = await read_list(source, one, wanted, access, limit)
    return MessagePage(
        queue=one.queue,
        state=wanted.state.word,
        sampled_at=found.at,
        problem=found.problem,
        messages=_shown(found.messages, access),
        ids=found.ids,
        searched=found.searched,
        total=None if one.counted is None else one.counted.count.stats.count(wanted.state),
        exact=None if one.counted is None else one.counted.exact,
        next=found.following,
    )


async def message(source: Source, request: Request) -> MessageDetail:
    """Return all that is known about a message."""
    seen = await source.watch.see()
    look = await find_message(source, seen, request.path_params["queue"], request.path_params["id"])
    found = value_of(look)
    return MessageDetail(
        id=found.id,
        queue=found.queue,
        state=None if found.state is None else found.state.word,
        sampled_at=look.at,
        reasons=found.reasons,
        message=None if found.stored is None else _shown([found.stored], request.state.access)[0],
        history=found.history,
        error=found.error,
    )


async def find(source: Source, request: Request) -> FoundPlaces:
    """Return the queues that have a message."""
    seen = await source.watch.see()
    places, unknown = await find_places(source, seen, request.query_params.get("id", "").strip())
    return FoundPlaces(
        places=[PlaceItem(queue=one.queue, id=one.stored.message.id, state=one.stored.state.word) for one in places],
        unknown=unknown,
    )


async def failures(source: Source, _request: Request) -> FoundFailures:
    """Return the groups of failed messages of all queues."""
    return await find_failures(source, await source.watch.see())


async def group(source: Source, request: Request) -> GroupMessages:
    """Return the newest messages of a group in a queue."""
    given = request.path_params
    found = await find_group(source, await source.watch.see(), given["queue"], given["key"])
    return GroupMessages(
        queue=given["queue"],
        sampled_at=found.look.at,
        problem=found.look.problem,
        group=None if found.group is None else found.group.group,
        count=None if found.group is None else found.group.count,
        messages=_shown(found.newest, request.state.access),
    )


async def schedules(source: Source, _request: Request) -> ScheduleList:
    """Return the schedules of all queues."""
    look = await find_schedules(source, await source.watch.see())
    return ScheduleList(sampled_at=look.at, problem=look.problem, schedules=look.value or [])


async def workers(source: Source, _request: Request) -> FoundWorkers:
    """Return the workers, and the messages that they hold."""
    return await find_workers(source, await source.watch.see())


async def activity(source: Source, request: Request) -> EventPage:
    """Return events of the history, the newest first."""
    asked = request.query_params
    found = await find_events(source, asked, request.state.access, _limit(asked, 100))
    return EventPage(events=found.events, searched_to=found.searched_to, next=found.cursor)


async def actions(source: Source, request: Request) -> ActionList:
    """Return what people did with the dashboard, the newest first."""
    look = await find_actions(source, await source.watch.see(), request.query_params)
    return ActionList(sampled_at=look.at, problem=look.problem, actions=look.value or [])


async def _item(source: Source, seen: Seen, one: QueueSnapshot) -> QueueItem:
    now = source.clock.time()
    problems = problems_of(one, await source.watch.past(one.queue, 0), seen.unworked.get(one.queue), now)
    item = QueueItem(
        queue=one.queue,
        status=status_of(one, problems)["status"],
        problems=[problem.line(now) for problem in problems],
        flow=one.flow,
    )
    if one.counted is None:
        return item
    stats = one.counted.stats_at(now)
    return msgspec.structs.replace(
        item,
        sampled_at=one.counted.at,
        exact=one.counted.exact,
        ready=stats.ready,
        leased=stats.leased,
        delayed=stats.delayed,
        done=stats.done,
        failed=stats.failed,
        blocked=stats.blocked,
        paused=stats.paused,
        oldest_age_s=stats.oldest_age_s,
        growth=one.counted.backlog_rate,
        empty_in_s=time_to_empty(one),
    )


def _shown(found: Sequence[StoredMessage], access: Access) -> list[dict[str, Any]]:
    return [text_json_of(stored, masked=not access.sees_secrets) for stored in found]


def _limit(asked: QueryParams, usual: int) -> int:
    return int(get_number(dict(asked), "limit", usual, least=1, most=_MOST))
