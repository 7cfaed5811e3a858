"""What the API answers. Times are Unix seconds. None means that something is not known, or not yet."""

from __future__ import annotations

from typing import Any

import msgspec

from qworker.failures.groups import FailureGroup
from qworker.history.event import Event
from qworker.sampling import FlowRates, RingSample
from qworker.schedules.store import ScheduleStatus
from qworker.tools.explain import Reason
from qworker.ui.audit import ActionRecord

__all__ = [
    "ActionList",
    "Error",
    "EventPage",
    "FoundPlaces",
    "GroupMessages",
    "MessageDetail",
    "MessagePage",
    "PlaceItem",
    "QueueDetail",
    "QueueItem",
    "QueuePage",
    "SamplePage",
    "ScheduleList",
    "TaskItem",
]


class Error(msgspec.Struct, frozen=True):
    """Why a request has failed.

    Attributes:
        error: One line.
    """

    error: str


class QueueItem(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a queue.

    Attributes:
        queue: Its name.
        status: One word: `Active`, `Idle`, `Paused`, `No worker`, `Trouble`, `Unusable` or `Counting…`.
        problems: What is wrong, one line each.
        sampled_at: When its messages were counted.
        exact: Whether nothing moved during the count.
        ready: Messages that wait for a worker. The next four are the other states.
        leased: Messages that workers hold.
        delayed: Messages that are due later.
        done: Finished messages that are kept.
        failed: Messages that will not run again.
        blocked: Messages that workers cannot read.
        paused: Whether the queue is paused.
        oldest_age_s: Seconds that the oldest ready message has waited.
        growth: The change of the number of ready, leased and delayed messages per second.
        empty_in_s: Seconds until nothing waits, if the queue goes on to shrink like this.
        flow: Rates and times from the history.
    """

    queue: str
    status: str
    problems: list[str] = []
    sampled_at: float | None = None
    exact: bool | None = None
    ready: int | None = None
    leased: int | None = None
    delayed: int | None = None
    done: int | None = None
    failed: int | None = None
    blocked: int | None = None
    paused: bool | None = None
    oldest_age_s: float | None = None
    growth: float | None = None
    empty_in_s: float | None = None
    flow: FlowRates | None = None


class QueuePage(msgspec.Struct, frozen=True, kw_only=True):
    """Some queues.

    Attributes:
        store: The URL of the store, without a password.
        sampled_at: When the sampler has last looked.
        problem: Why the store cannot be asked now. The numbers are those from before.
        queues: The queues by name.
        next: The value of `after` for the next page.
    """

    store: str
    sampled_at: float | None = None
    problem: str | None = None
    queues: list[QueueItem]
    next: str | None = None


class TaskItem(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a queue.

    Attributes:
        task: Its name. Empty: messages without a task.
        ready: Its ready messages, if the store counts them by task.
        flow: Its rates and times.
    """

    task: str
    ready: int | None = None
    flow: FlowRates | None = None


class QueueDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One queue and its tasks."""

    store: str
    sampled_at: float | None = None
    problem: str | None = None
    queue: QueueItem
    tasks: list[TaskItem]


class SamplePage(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled of a queue, by time. A period without a sample is missing.

    Attributes:
        queue: Its name.
        step_s: Seconds from one sample to the next.
        samples: The samples.
    """

    queue: str
    step_s: float
    samples: list[RingSample]


class MessagePage(msgspec.Struct, frozen=True, kw_only=True):
    """A list of messages.

    Attributes:
        queue: The queue.
        state: Their state.
        sampled_at: When they were read. None: they are being read.
        problem: Why they cannot be read.
        messages: The messages, as `qworker browse --json` prints them.
        ids: The ids of the next messages, in place of a list of a very deep queue.
        searched: The number of messages that were compared with the filter.
        total: The messages in the state, as last counted.
        exact: Whether nothing moved during that count.
        next: The value of `after` for the next page, or to continue the search.
    """

    queue: str
    state: str
    sampled_at: float | None = None
    problem: str | None = None
    messages: list[dict[str, Any]]
    ids: list[str] = []
    searched: int | None = None
    total: int | None = None
    exact: bool | None = None
    next: str | None = None


class MessageDetail(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about a message.

    Attributes:
        id: Its id.
        queue: Its queue.
        state: Its state. None: it is not stored.
        sampled_at: When it was read.
        reasons: The facts about it, the most important first.
        message: The stored message.
        history: Its events, the oldest first.
        error: Its last failure.
    """

    id: str
    queue: str
    state: str | None
    sampled_at: float | None
    reasons: list[Reason]
    message: dict[str, Any] | None = None
    history: list[Event] = []
    error: str | None = None


class PlaceItem(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that has a message."""

    queue: str
    id: str
    state: str


class FoundPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """Where a message is.

    Attributes:
        places: The queues that have it.
        unknown: The queues that did not answer in time, or cannot be used.
    """

    places: list[PlaceItem]
    unknown: list[str] = []


class GroupMessages(msgspec.Struct, frozen=True, kw_only=True):
    """The newest messages of a group in a queue.

    Attributes:
        queue: The queue.
        sampled_at: When they were read. None: they are being read.
        problem: Why they cannot be read.
        group: The group.
        count: The number of messages that were found.
        messages: The newest of them.
    """

    queue: str
    sampled_at: float | None = None
    problem: str | None = None
    group: FailureGroup | None = None
    count: int | None = None
    messages: list[dict[str, Any]] = []


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True):
    """The schedules of the store."""

    sampled_at: float | None = None
    problem: str | None = None
    schedules: list[ScheduleStatus]


class ActionList(msgspec.Struct, frozen=True, kw_only=True):
    """What people did with the dashboard, the newest first."""

    sampled_at: float | None = None
    problem: str | None = None
    actions: list[ActionRecord]


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events, the newest first.

    Attributes:
        events: The events.
        searched_to: The history was searched back to this moment. None: to its beginning.
        next: The value of `cursor` to continue. None: nothing is left.
    """

    events: list[Event]
    searched_to: float | None = None
    next: str | None = None
