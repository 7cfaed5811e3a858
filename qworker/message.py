"""Messages, their states, and the operations on them.

                publish                  lease                    ack
    (producer) ─────────► ready ─────────────────────► leased ─────────► done, or gone
                 │          ▲                          │ │ │
       due later │          │ reap (due)       release │ │ │ fail_perm
                 ▼          │                          │ │ └─────────► failed ──► requeue: ready
              delayed ◄─────┴────────── fail_tmp, reap ┘ │                        (tries = 0)
                                        (tries + 1)      │
                            ready ◄──────────────────────┘ (tries unchanged)

                 cancel: from ready, delayed and leased to failed, whatever worker holds the message

Every arrow is one atomic step of the store. If the message is leased, the step depends on the token of the lease.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Self, cast

import msgspec

from qworker.errors import UsageError
from qworker.unique import Unique

__all__ = [
    "OUTCOMES",
    "STATE_WORDS",
    "Cancelled",
    "Draft",
    "FinishedMessage",
    "KeyHolder",
    "Lease",
    "LostLease",
    "Message",
    "MessageRef",
    "Query",
    "QueueStats",
    "ReapResult",
    "Selection",
    "SettleAction",
    "Settlement",
    "State",
    "StoredMessage",
    "to_microseconds",
]


class State(StrEnum):
    """The state of a stored message.

    The value is the stored form: in names of directories, Redis keys, script arguments and archives. People and
    programs read `word` instead.
    """

    READY = "ready"
    LEASED = "leased"
    DELAYED = "delayed"
    DONE = "done"
    FAILED = "fail"

    @property
    def word(self) -> str:
        """The word that the command line, JSON, metrics and error texts show."""
        return STATE_WORDS[self]

    @classmethod
    def of_word(cls, word: str) -> State:
        """Return the state of a word that is shown.

        Raises:
            UsageError: The word is not a state.
        """
        for state, shown in STATE_WORDS.items():
            if shown == word:
                return state
        raise UsageError(f"state must be one of {', '.join(STATE_WORDS.values())} (got {word!r})")


STATE_WORDS: dict[State, str] = {
    State.READY: "ready",
    State.LEASED: "leased",
    State.DELAYED: "delayed",
    State.DONE: "done",
    State.FAILED: "failed",
}


class Draft(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message to be published.

    Attributes:
        body: The bytes that its handler gets.
        id: While a message with this id is stored, in any state, another one is not stored. It can be any text:
            `publish` returns the message id, which is a digest if the text is long or unusual. None: the backend
            creates an id.
        delay: Seconds from now, by the store's clock, until the message can be leased.
        due_at: Unix seconds at which it can be leased, instead of `delay`.
        priority: 0 (default) to 9 (first).
        unique_key: While a message with this key is ready, delayed or leased, another one is not stored.
        unique: How the key is freed, and what is done if another message has it. Its `key` and `by` have no meaning
            here. None: the key is held until the message has finished, and the earlier message is kept.
        task: The task's name, as a label in listings of the store. None without a task.
        argv: fsq's arguments, for protocols that have them.
        fields: rfq's flat map, for protocols that have one.
        tries: The failed attempts of a message that comes from another store.
        enqueued_at: Unix seconds at which a message that comes from another store was enqueued there.
        original_id: The message's id in the store that it comes from, for protocols that assign ids themselves. It is
            kept with the message, and a second message with the same original id is not stored.
        hold: Seconds from the publish for which the id stays taken.
    """

    body: bytes
    id: str | None = None
    delay: float = 0.0
    due_at: float | None = None
    priority: int = 0
    unique_key: str | None = None
    unique: Unique | None = None
    task: str | None = None
    argv: tuple[str, ...] = ()
    fields: Mapping[str, str] | None = None
    tries: int = 0
    enqueued_at: float | None = None
    original_id: str | None = None
    hold: float = 0.0


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One unit of work in a queue.

    Attributes:
        id: Its id. An id that qworker created is unique in the world.
        queue: The queue's name.
        body: The bytes as they were published.
        tries: Failed attempts so far: temporary failures and expired leases both count.
        enqueued_at: Unix seconds at which it was enqueued.
        priority: 0 (default) to 9 (first).
        unique_key: Its unique key, if it has one.
        unique: How the key is freed (`until`, `scope`). None: when the message has finished, in its queue.
        argv: fsq's arguments, or the original name of a raw file that another program put into the queue.
        fields: rfq's flat map.
        original_id: The id that it had in another store, if this store assigned a new one.
        deaths: Attempts in a row, up to the last one, that ended with the death of their process or the expiry of their
            lease. The message is a suspect if there is one. An attempt that ends by itself sets it to 0. A store that
            has no place for it declares the deviation `deaths`.
    """

    id: str
    queue: str
    body: bytes
    tries: int = 0
    enqueued_at: float = 0.0
    priority: int = 0
    unique_key: str | None = None
    unique: Unique | None = None
    argv: tuple[str, ...] = ()
    fields: Mapping[str, str] | None = None
    original_id: str | None = None
    deaths: int = 0


class Lease(msgspec.Struct, kw_only=True, eq=False):
    """The exclusive right to run a message until an expiry.

    Backends subclass it with the data that they need to find the leased message again.

    Attributes:
        message: The message.
        token: The fencing token, which rises with each delivery of the message. A holder with an old token cannot
            change the message.
        expires_at: Unix seconds, by the store's clock, at which the lease expires.
    """

    message: Message
    token: int
    expires_at: float


class LostLease(msgspec.Struct, frozen=True):
    """A lease that has ended without its holder.

    Attributes:
        id: The message's id.
        token: The lease's fencing token. Compare it: the same message may be leased again.
        cancelled: Whether the message was cancelled. False: the lease expired, or the message was removed.
    """

    id: str
    token: int
    cancelled: bool = False


class ReapResult(msgspec.Struct, frozen=True):
    """The answer of `reap`.

    Attributes:
        returned: Number of messages that became ready.
        lost: The leases of this instance in this queue that are gone. Each is named once. A lease that this instance
            has settled is not lost. A store that cannot know it names none, and `extend` and `settle` find out.
        now: Unix seconds, by the store's clock.
    """

    returned: int = 0
    lost: Sequence[LostLease] = ()
    now: float = 0.0


class Cancelled(msgspec.Struct, frozen=True):
    """What `cancel` has found of one message.

    Attributes:
        id: The message's id.
        state: Its state before the call. `DONE` or `FAILED`: it had finished, and is not changed.
        token: No lease of the message had a higher fencing token so far, and each later lease has a higher one.
        already: Whether it was cancelled before, by another call or by an attempt of this one whose answer was lost.
    """

    id: str
    state: State
    token: int
    already: bool = False


class MessageRef(str):
    """A message id that also says the task, for `find`. It can be used wherever an id can.

    If the store created the id and keeps the task in the name of the message, the message is found without a listing
    of what is ready.

    Attributes:
        task: The name of the task with which the message was published. None: it is not known.
        perhaps: If the task is not known, the names of tasks that it may be. They are tried before anything is listed,
            and what is ready is listed last.
    """

    __slots__ = ("perhaps", "task")
    task: str | None
    perhaps: tuple[str, ...]

    def __new__(
        cls,
        id: str,  # noqa: A002 - the word of all other classes
        task: str | None = None,
        perhaps: tuple[str, ...] = (),
    ) -> Self:
        """Create a reference."""
        ref = super().__new__(cls, id)
        ref.task = task
        ref.perhaps = perhaps
        return ref

    @property
    def id(self) -> str:
        """The message's id."""
        return str(self)


class KeyHolder(str):
    """The id of the message that has a unique key, which `publish` returns if that message is in another queue.

    Attributes:
        queue: The queue of the message.
    """

    __slots__ = ("queue",)
    queue: str

    def __new__(cls, id: str, queue: str) -> Self:  # noqa: A002 - the word of all other classes
        """Create it."""
        holder = super().__new__(cls, id)
        holder.queue = queue
        return holder


class SettleAction(StrEnum):
    """How a lease ends."""

    ACK = "ack"
    FAIL_TMP = "fail_tmp"
    FAIL_PERM = "fail_perm"
    RELEASE = "release"


# The outcome of each action, when the store has carried it out.
OUTCOMES: dict[SettleAction, Literal["acked", "retried", "failed", "released"]] = {
    SettleAction.ACK: "acked",
    SettleAction.FAIL_TMP: "retried",
    SettleAction.FAIL_PERM: "failed",
    SettleAction.RELEASE: "released",
}


class Settlement(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The end of one lease.

    Attributes:
        lease: The lease.
        action: How the lease ends.
        delay: Seconds until the message can run again, for fail_tmp and release.
        error: The error that is kept with the message, for fail_tmp and fail_perm.
        died: Whether the process of the handler died, for fail_tmp: deaths + 1. Otherwise a fail_tmp sets deaths to 0.
        survived: Whether the handler has ended by itself, for release: this sets deaths to 0. Otherwise they stay.
    """

    lease: Lease
    action: SettleAction
    delay: float = 0.0
    error: str | None = None
    died: bool = False
    survived: bool = False


class Query(msgspec.Struct, frozen=True):
    """The messages that `browse` returns: those in one state, or some of them.

    Attributes:
        state: The state of the messages.
        part: One of the state's `parts`. Its messages come in any order. None: all messages, in the order of the state.
        after: The `position` of a message. Only messages that follow it are returned. None: start at the beginning.
        limit: The maximum number of messages, at least 1. None: no limit.
        newest: Whether the order is reversed, with the last message first.

    Raises:
        UsageError: The limit is less than 1, or a part comes with `after` or `newest`.
    """

    state: State
    part: str | None = None
    after: str | None = None
    limit: int | None = None
    newest: bool = False

    def __post_init__(self) -> None:
        """Check the limit and the part."""
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit must be at least 1 (got {self.limit})")
        if self.part is not None and (self.newest or self.after is not None):
            raise UsageError("a part has no order: ask for a part, or for `after` and `newest`")


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message as `browse` and `find` return it. It is not leased.

    Attributes:
        message: The message.
        state: Its state.
        due_at: Unix seconds at which a delayed message can be leased. None in other states.
        expires_at: Unix seconds at which the lease of a leased message expires. None in other states.
        finished_at: Unix seconds at which a done or failed message finished. None in other states.
        holder: The worker that holds the lease.
        error: The message's last error.
        location: The store's location of a finished message, for `Selection.unchanged` only.
        position: The message's position in the order of its state, for `Query.after` only: short plain text. None if
            the message was found by its id, or in a part.
    """

    message: Message
    state: State
    due_at: float | None = None
    expires_at: float | None = None
    finished_at: float | None = None
    holder: str | None = None
    error: str | None = None
    location: str | None = None
    position: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields for JSON, with the body in base64 and the word of the state."""
        return {**msgspec.to_builtins(self), "state": self.state.word}

    def to_text_json(self) -> dict[str, Any]:
        """Return the fields for JSON that people read. If the body is not text, `body_base64` is in place of `body`."""
        message = self.message
        data: dict[str, Any] = {"id": message.id, "queue": message.queue, "state": self.state.word}
        data |= {"tries": message.tries, "enqueued_at": message.enqueued_at, "priority": message.priority}
        data |= {"unique_key": message.unique_key, "argv": list(message.argv)}
        data["original_id"] = message.original_id
        data["fields"] = dict(message.fields) if message.fields is not None else None
        data |= {"due_at": self.due_at, "expires_at": self.expires_at, "finished_at": self.finished_at}
        data |= {"holder": self.holder, "error": self.error, "position": self.position}
        try:
            data["body"] = message.body.decode()
        except UnicodeDecodeError:
            data["body_base64"] = base64.b64encode(message.body).decode()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoredMessage:
        """Return the message from the result of `to_json`.

        Raises:
            UsageError: The state is not known.
            msgspec.ValidationError: A field is missing or has the wrong type.
        """
        return msgspec.convert({**data, "state": State.of_word(data["state"]).value}, StoredMessage)


class FinishedMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A done or failed message as `browse` or `find` returned it, for `Selection.unchanged`.

    Attributes:
        id: The message's id.
        state: `DONE` or `FAILED`.
        finished_at: Unix seconds at which it finished.
        location: The store's location of the message, from `StoredMessage.location`.
    """

    id: str
    state: State
    finished_at: float | None
    location: str | None = None

    def matches(self, stored: StoredMessage | None) -> bool:
        """Return whether `stored` is this message, unchanged to the microsecond."""
        return (
            stored is not None
            and stored.message.id == self.id
            and stored.state is self.state
            and self.has_finished_at(stored.finished_at)
        )

    def has_finished_at(self, finished_at: float | None) -> bool:
        """Return whether the message finished at this time, in Unix seconds."""
        return to_microseconds(finished_at) == to_microseconds(self.finished_at)


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages of a queue, for `requeue`, `remove` and `cancel`. Exactly one of the three forms is given.

    Attributes:
        ids: The messages with these ids. An empty list selects none.
        state: All messages in this state.
        unchanged: The done and failed messages of this list that are unchanged since they were found. A message that
            was requeued since then, or has finished again, is not selected.

    Raises:
        UsageError: None of the three is given, or several are.
    """

    ids: Sequence[str] | None = None
    state: State | None = None
    unchanged: Sequence[FinishedMessage] | None = None

    def __post_init__(self) -> None:
        """Check that there is exactly one form."""
        if [self.ids, self.state, self.unchanged].count(None) != 2:
            raise UsageError("a Selection must have exactly one of ids, state and unchanged")

    def to_json(self) -> dict[str, Any]:
        """Return the given form for JSON, with the words of its states."""
        plain = self if self.ids is None else Selection(ids=[str(message_id) for message_id in self.ids])
        data: dict[str, Any] = msgspec.to_builtins(plain)
        for one in (data, *data.get("unchanged", ())):
            if "state" in one:
                one["state"] = State(one["state"]).word
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Selection:
        """Return the selection from the result of `to_json`.

        Raises:
            UsageError: A state is not known, or there is not exactly one form.
            msgspec.ValidationError: A field is missing or has the wrong type.
        """
        return msgspec.convert(
            _with_stored_state({**data, "unchanged": _each_stored(data.get("unchanged"))}), Selection
        )

    def require_failed(self) -> None:
        """Check that the selection is of failed messages only, or by ids.

        Raises:
            UsageError: The selection is of messages in another state.
        """
        states = [self.state] if self.state is not None else [one.state for one in self.unchanged or ()]
        for state in states:
            if state is not State.FAILED:
                raise UsageError(f"only failed messages can be requeued (got the state {state.word})")

    def require_unfinished(self) -> None:
        """Check that the selection is by ids, or of messages that have not finished.

        Raises:
            UsageError: The selection is of done or failed messages.
        """
        if self.unchanged is not None or self.state in {State.DONE, State.FAILED}:
            raise UsageError("only ready, delayed and leased messages can be cancelled")


def _each_stored(values: object) -> object:
    return [_with_stored_state(value) for value in cast("list[object]", values)] if isinstance(values, list) else values


def _with_stored_state(value: object) -> object:
    """Return a JSON object with the stored value of its state in place of the word."""
    if not isinstance(value, dict):
        return value
    data = cast("dict[str, Any]", value)
    return data if data.get("state") is None else {**data, "state": State.of_word(data["state"]).value}


def to_microseconds(seconds: float | None) -> int | None:
    """Return whole microseconds. Archives keep times with this precision, and times are compared with it."""
    return None if seconds is None else round(seconds * 1e6)


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a queue.

    Attributes:
        queue: The queue's name.
        ready: Number of messages that wait for a worker.
        leased: Number of messages that workers hold.
        delayed: Number of messages that are due later.
        done: Number of acked messages that are kept.
        failed: Number of messages that will not run again.
        oldest_age_s: Seconds that the oldest ready message has waited. None if no message is ready.
        paused: Whether the queue is paused.
        blocked: Number of messages that cannot be leased, because their files cannot be opened, read or moved, or
            are larger than `max_body`. They are counted in their states too. Only directory queues have any.
        retention: How long finished messages are kept, as text by state. Empty if they are never removed.
        problem: Why the queue cannot be used, such as a missing permission. Its counts are 0 then. None: it can be
            used.
    """

    queue: str
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    done: int = 0
    failed: int = 0
    oldest_age_s: float | None = None
    paused: bool = False
    blocked: int = 0
    retention: Mapping[str, str] = {}
    problem: str | None = None

    def count(self, state: State) -> int:
        """Return the number of messages in a state."""
        counts = {State.READY: self.ready, State.DELAYED: self.delayed, State.LEASED: self.leased}
        return (counts | {State.DONE: self.done, State.FAILED: self.failed})[state]
