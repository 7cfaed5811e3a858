"""The records of schedules: cells of the group `schedules`, in the queue of the call.

`definition:NAME` is the schedule, `tick:NAME` its last tick, with the tick as the rank, and `pause:NAME` is there while
it is paused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from qworker.cell import MOST_VALUE, Cell, CellOp
from qworker.envelope import CallOptions, EnvelopeEncoder
from qworker.errors import UsageError
from qworker.message import Draft
from qworker.schedules.timetable import MOST_LATE, Timetable, late_of, timetable_of
from qworker.tick import TICK_HEADER, tick_header, tick_id
from qworker.unique import Unique

__all__ = [
    "DEFINITION",
    "GROUP",
    "PAUSE",
    "TICK",
    "Definition",
    "LastTick",
    "cell_name",
    "definition_op",
    "last_tick_of",
    "read_definition",
    "tick_cell",
]

GROUP = "schedules"
DEFINITION = "definition"
TICK = "tick"
PAUSE = "pause"

# Seconds for which the id of a tick stays taken, at least.
_LEAST_HOLD = 7200.0
# Seconds for which a last tick is kept: longer than anything can be caught up, and than most periods.
_TICK_KEPT = 400 * 86_400.0


class Definition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule as it is stored. Another release of the app can tick by it, so it has the whole call."""

    name: str
    queue: str
    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    headers: dict[str, str] = {}
    # What travels with the call.
    options: CallOptions | None = None
    cron: str | None = None
    every: int | None = None
    tz: str = "UTC"
    catch_up: Literal["latest", "all", "none"] = "latest"
    overlap: Literal["allow", "skip"] = "allow"
    priority: int = 0
    delay: float = 0.0
    unique_key: str | None = None
    unique: Unique | None = None
    # Whether a decorator defines it. Otherwise `put` or `sync` has stored it.
    in_code: bool = False
    # The set of the `sync` that has stored it.
    set_name: str | None = None

    @property
    def timetable(self) -> Timetable:
        """Its ticks.

        Raises:
            UsageError: The expression or the time zone is not known here.
        """
        return timetable_of(self.cron, self.every, self.tz)

    @property
    def times(self) -> str:
        """A text that differs if its ticks do."""
        return f"every {self.every}" if self.cron is None else f"{self.cron} {self.tz}"

    @property
    def text(self) -> str:
        """Its times as text, for people."""
        return f"every {self.every} s" if self.cron is None else f"{self.cron} ({self.tz})"

    def draft(self, tick: int | None, now: float) -> Draft:
        """Return the message of a tick. None: that of a run out of turn."""
        headers = dict(self.headers)
        if tick is not None:
            headers[TICK_HEADER] = tick_header(self.name, tick, self.tz)
        draft = Draft(
            body=EnvelopeEncoder(self.task).encode(tuple(self.args), self.kwargs, headers, self.options),
            task=self.task,
            priority=self.priority,
            delay=self.delay,
            unique_key=self.unique_key,
            unique=self.unique,
        )
        if tick is None:
            return draft
        hold = max(_LEAST_HOLD, 2 * late_of(self.timetable, now))
        return msgspec.structs.replace(draft, id=tick_id(self.name, tick), hold=hold)


class LastTick(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last tick of a schedule.

    Attributes:
        at: The tick in Unix seconds. Until the first tick: when the schedule was first seen.
        run: The last tick that was enqueued. None: none yet.
        skipped: Whether the last tick was not enqueued, because the call of an earlier one was not done.
        times: `Definition.times` of the schedule. A schedule whose times change has missed nothing: it ticks from then
            on.
    """

    at: int
    run: int | None = None
    skipped: bool = False
    times: str = ""


_encode = msgspec.json.Encoder().encode
_decode_definition = msgspec.json.Decoder(Definition).decode
_decode_tick = msgspec.json.Decoder(LastTick).decode


def cell_name(kind: str, name: str) -> Cell:
    """Return the cell of a kind for a schedule, without a value."""
    return Cell(GROUP, f"{kind}:{name}")


def definition_op(definition: Definition, rank: int, *, ttl: float | None = None, only: str | None = None) -> CellOp:
    """Return the put of a definition.

    Raises:
        UsageError: The call is too large for a cell.
    """
    value = _encode(definition)
    if len(value) > MOST_VALUE:
        raise UsageError(
            f"the call is too large ({len(value) >> 10} KiB of at most {MOST_VALUE >> 10} KiB):"
            " keep large data elsewhere, and pass its path or id"
        )
    return CellOp("put", Cell(GROUP, f"{DEFINITION}:{definition.name}", value, ttl=ttl, rank=rank), only)


def read_definition(cell: Cell | None) -> Definition | None:
    """Return the definition in a cell. None: there is none, or a newer release has written it, or it is damaged."""
    if cell is None:
        return None
    try:
        return _decode_definition(cell.value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def tick_cell(name: str, last: LastTick) -> Cell:
    """Return the cell of a last tick."""
    return Cell(GROUP, f"{TICK}:{name}", _encode(last), ttl=_TICK_KEPT, rank=last.at)


def last_tick_of(cell: Cell | None, now: float) -> LastTick | None:
    """Return the last tick in a cell. None: there is none, or it is damaged, such as more than a day ahead."""
    if cell is None:
        return None
    try:
        last = _decode_tick(cell.value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return last if last.at == cell.rank and 0 <= last.at <= now + MOST_LATE else None
