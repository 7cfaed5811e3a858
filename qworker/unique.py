"""The options of a unique key: how long it is held, and what another call with it does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, cast, get_args

import msgspec

from qworker.duration import Seconds
from qworker.errors import UsageError
from qworker.names import check_key
from qworker.retry import MOST_DELAY
from qworker.validation import check_seconds, check_text, shown

__all__ = ["Again", "Scope", "Unique", "Until", "check_due", "debounced_due"]

Until = Literal["done", "started"]
Again = Literal["keep", "replace", "debounce", "error"]
Scope = Literal["queue", "app"]


class Unique(msgspec.Struct, frozen=True, omit_defaults=True):
    """At most one call with a key waits or runs.

    Attributes:
        key: The key: text of 1 to 255 bytes.
        by: The names of the parameters whose values make the key, instead of `key`. Calls of different tasks have
            different keys.
        until: When the key is free again. `done`: when the call has ended: it is done, has failed permanently, or was
            cancelled or removed. `started`: when it is leased for the first time.
        again: What another call with the key does. `keep`: nothing is stored. `replace`: the arguments, the priority
            and the due time of the waiting call become the new ones. `debounce`: the same, and the call is due `wait`
            seconds after the last one. `error`: `AlreadyEnqueued` is raised. With `replace` and `debounce`, if the
            earlier call runs, the new one waits with the key.
        wait: Seconds from the last call until it runs, for `debounce`, or a timedelta.
        at_most: Seconds from the first call after which it runs in any case, for `debounce`, or a timedelta. None: no
            limit.
        scope: Where the key counts: in the `queue` of the call, or in all queues of the store (`app`).

    Raises:
        InvalidName: The key is empty or too long.
        UsageError: An option has a wrong value, or does not go with another one.
    """

    key: str | None = None
    by: Sequence[str] | None = None
    until: Until = "done"
    again: Again = "keep"
    wait: Seconds = 0.0
    at_most: Seconds | None = None
    scope: Scope = "queue"

    def __post_init__(self) -> None:
        self._check_key()
        for name, choices in (("until", Until), ("again", Again), ("scope", Scope)):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise UsageError(f"unique: {name} must be one of {', '.join(get_args(choices))} (got {shown(value)})")
        self._check_times()
        if self.scope == "app" and self.replaces:
            raise UsageError(
                f'unique: scope="app" cannot have again="{self.again}", because the waiting call may be in another'
                ' queue: use scope="queue"'
            )

    def _check_key(self) -> None:
        if self.key is not None:
            check_key(check_text("unique: key", self.key))
            if self.by is not None:
                raise UsageError("unique: key and by cannot be given together: leave one out")
        if self.by is not None:
            by = cast("object", self.by)
            names = cast("Sequence[object]", by)
            if isinstance(by, str) or not isinstance(by, Sequence) or not all(isinstance(name, str) for name in names):
                raise UsageError(f'unique: by must be names of parameters, such as by=("user",) (got {shown(names)})')
            if not by:
                raise UsageError("unique: by must name at least one parameter (got none): write key= for all calls")
            msgspec.structs.force_setattr(self, "by", tuple(self.by))

    def _check_times(self) -> None:
        if self.again != "debounce":
            for name, value in (("wait", self.wait or None), ("at_most", self.at_most)):
                if value is not None:
                    raise UsageError(f'unique: {name}= needs again="debounce" (got {self.again!r})')
            return
        wait = check_seconds("unique: wait", self.wait, positive=True, most=MOST_DELAY)
        msgspec.structs.force_setattr(self, "wait", wait)
        if self.at_most is not None:
            most = check_seconds("unique: at_most", self.at_most, positive=True, most=MOST_DELAY)
            if most < wait:
                raise UsageError(f"unique: at_most must be at least wait (got {most:g} and {wait:g})")
            msgspec.structs.force_setattr(self, "at_most", most)

    @property
    def replaces(self) -> bool:
        """Whether another call changes the waiting one."""
        return self.again in {"replace", "debounce"}

    def for_draft(self) -> Unique | None:
        """Return these options without the key, which a draft has next to them. None: they are the usual ones."""
        plain = msgspec.structs.replace(self, key=None, by=None)
        return None if plain == _USUAL else plain

    def stored(self) -> Unique | None:
        """Return what a message keeps of it: how its key is freed. None: as without options."""
        return None if self.until == "done" and self.scope == "queue" else Unique(until=self.until, scope=self.scope)


_USUAL = Unique()


def check_due(unique: Unique | None, delay: float, due_at: float | None) -> None:
    """Check that a call with a unique key can have a due time.

    Raises:
        UsageError: It is debounced, so `wait` sets its due time.
    """
    if unique is not None and unique.again == "debounce" and (delay > 0 or due_at is not None):
        raise UsageError("a debounced call is due after wait: leave delay= and due_at= out")


def debounced_due(unique: Unique, now: float, first: float) -> float:
    """Return the Unix seconds at which a debounced call is due.

    Args:
        unique: Its options.
        now: The store's time.
        first: When the first call with the key was enqueued; `now` for the first one.
    """
    due = now + float_of(unique.wait)
    return due if unique.at_most is None else min(due, max(first + float_of(unique.at_most), now))


def float_of(seconds: Seconds) -> float:
    """Return a time as seconds."""
    return seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
