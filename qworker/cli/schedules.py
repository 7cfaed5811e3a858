"""`qworker schedules`: list, put, remove, pause, resume and run schedules."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Literal

import click
import msgspec

from qworker.backend import Backend
from qworker.backend.offers import store_time
from qworker.cli.options import URLCommand, backend_from_url, duration_type, json_option, run
from qworker.cli.output import echo, print_json, print_table
from qworker.clock import SYSTEM_CLOCK
from qworker.envelope import EnvelopeEncoder
from qworker.errors import InvalidArguments, UsageError
from qworker.message import Draft
from qworker.names import check_queue
from qworker.schedules.code import check_deviations
from qworker.schedules.control import run_now
from qworker.schedules.schedule import Schedule, check_name, definition_of, naming_schedule
from qworker.schedules.store import (
    ScheduleStatus,
    StoredSchedule,
    find_schedule,
    put_definition,
    read_statuses,
    remove_schedule,
    set_paused,
)
from qworker.task import Call

__all__ = ["command", "format_tick", "read_all"]

_COLUMNS = ("name", "queue", "task", "definition", "last", "outcome", "next", "note")


@click.command("schedules", cls=URLCommand)
@click.argument("url")
@click.argument(
    "action", required=False, type=click.Choice(["put", "remove", "pause", "resume", "run"]), metavar="[ACTION"
)
@click.argument("name", required=False, metavar="NAME]")
@click.option("--task", metavar="TASK", help="The task that `put` schedules.")
@click.option(
    "-Q",
    "--queue",
    type=check_queue,
    metavar="QUEUE",
    default="default",
    help="The queue of the call that `put` schedules.",
)
@click.option("--args", metavar="JSON", default="[]", help="The arguments of the call, as a JSON array.")
@click.option("--kwargs", metavar="JSON", default="{}", help="The keyword arguments of the call, as a JSON object.")
@click.option("--cron", metavar="EXPRESSION", help="A cron expression of 5 fields, or of 6 with the seconds first.")
@click.option("--every", type=duration_type(), help="The time between two ticks, such as 15s or 5m.")
@click.option("--tz", metavar="ZONE", default="UTC", show_default=True, help="The time zone of --cron.")
@click.option(
    "--catch-up",
    type=click.Choice(["latest", "all", "none"]),
    default="latest",
    show_default=True,
    help="Which ticks run of those that no worker was there for.",
)
@click.option(
    "--overlap",
    type=click.Choice(["allow", "skip"]),
    default="allow",
    show_default=True,
    help="With skip, no tick is enqueued while the call of an earlier one waits or runs.",
)
@json_option
def command(
    url: str,
    action: str | None,
    name: str | None,
    task: str | None,
    queue: str,
    args: str,
    kwargs: str,
    cron: str | None,
    every: float | None,
    tz: str,
    catch_up: Literal["latest", "all", "none"],
    overlap: Literal["allow", "skip"],
    json: bool,
) -> None:
    r"""List the schedules of a store, or change one.

    ACTION is put, remove, pause, resume or run (one run now). A schedule in the code is listed when a worker has
    started with it, and cannot be put or removed. Workers look for changes every few seconds.

    \b
    Examples:
      qworker schedules file://./spool
      qworker schedules file://./spool put acme --task report --args '["long"]' --cron '0 6 * * *' --tz Europe/Berlin
      qworker schedules file://./spool pause acme
    """
    if action is None:
        run(_list(url, json))
        return
    if name is None:
        raise UsageError(f"qworker schedules URL {action} needs the name of a schedule")
    if action == "put":
        if task is None:
            raise UsageError("put needs the task to call: --task TASK")
        body = EnvelopeEncoder(task).encode(tuple(_read(args, list[Any])), _read(kwargs, dict[str, Any]), {})
        call = Call(queue, Draft(body=body, task=task))
        said = run(_put(url, name, Schedule(call, cron, every, tz, catch_up, overlap)))
    else:
        said = run(_change(url, name, _ACTIONS[action]))
    if json:
        # A run out of turn says the id of its message.
        more = {"id": said.rpartition(" ")[2]} if action == "run" else {}
        print_json({"schedule": name, "action": action, **more})
    else:
        echo(f"{name} {said}")


def _read(text: str, wanted: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=wanted)
    except msgspec.DecodeError as error:
        what = "a JSON array" if wanted == list[Any] else "a JSON object"
        raise InvalidArguments(f"{text!r} is not {what}: {error}") from error


async def read_all(backend: Backend, queues: Sequence[str]) -> list[ScheduleStatus]:
    """Return the schedules of queues, by name."""
    return await read_statuses(backend, queues, SYSTEM_CLOCK.time())


async def _list(url: str, json: bool) -> None:
    async with backend_from_url(url) as backend:
        _check(backend)
        rows = await read_all(backend, await backend.queues())
    if json:
        print_json(rows)
    elif rows:
        print_table(_COLUMNS, [_cells(row) for row in rows], texts=("definition",))
    else:
        echo("no schedules: @tasks.cron, @tasks.every and tasks.schedules.put define them")


def _check(backend: Backend) -> None:
    check_deviations(backend.describe().partition(":")[0], backend.deviations)


def _cells(row: ScheduleStatus) -> tuple[str, ...]:
    note = ", ".join([*(["paused"] if row.paused else []), *(["in code"] if row.in_code else [])])
    last, upcoming = format_tick(row.last), format_tick(row.next)
    return row.name, row.queue, row.task, row.definition, last, row.outcome or "-", upcoming, note


def format_tick(tick: datetime | None) -> str:
    """Return a tick in the time zone of its schedule, or `-` for None."""
    return "-" if tick is None else f"{tick:%Y-%m-%d %H:%M:%S %Z}"


async def _put(url: str, name: str, schedule: Schedule) -> str:
    definition = definition_of(check_name(name), schedule)
    async with backend_from_url(url, make=True) as backend:
        _check(backend)
        # Its first tick follows this time, by which the workers count.
        now = await store_time(backend, definition.queue, SYSTEM_CLOCK)
        stored = await find_schedule(backend, await backend.queues(), name, now)
        if stored is not None:
            _refuse_code(stored, "use another name")
        with naming_schedule(name):
            await put_definition(backend, definition, now)
        if stored is not None and stored.home != definition.queue:
            await remove_schedule(backend, stored)
    return f"is put: {definition.text}"


def _refuse_code(stored: StoredSchedule, advice: str) -> None:
    if stored.definition.in_code:
        raise UsageError(f"schedule {stored.definition.name!r} is defined in code: {advice}")


async def _change(url: str, name: str, change: Callable[[Backend, StoredSchedule], Coroutine[Any, Any, str]]) -> str:
    async with backend_from_url(url) as backend:
        _check(backend)
        stored = await find_schedule(backend, await backend.queues(), name, SYSTEM_CLOCK.time())
        if stored is None:
            raise UsageError(f"there is no schedule {name!r}: `qworker schedules URL` lists them")
        return await change(backend, stored)


async def _remove(backend: Backend, stored: StoredSchedule) -> str:
    _refuse_code(stored, "remove it there, or pause it")
    await remove_schedule(backend, stored)
    return "is removed"


async def _pause(backend: Backend, stored: StoredSchedule) -> str:
    await set_paused(backend, stored.definition.queue, stored.definition.name, paused=True)
    return "is paused: it does not tick until it is resumed"


async def _resume(backend: Backend, stored: StoredSchedule) -> str:
    await set_paused(backend, stored.definition.queue, stored.definition.name, paused=False)
    return "is resumed"


async def _run(backend: Backend, stored: StoredSchedule) -> str:
    message_id = await run_now(backend, stored.definition, SYSTEM_CLOCK.time())
    return f"is enqueued: {message_id}"


_ACTIONS: dict[str, Callable[[Backend, StoredSchedule], Coroutine[Any, Any, str]]] = {
    "remove": _remove,
    "pause": _pause,
    "resume": _resume,
    "run": _run,
}
