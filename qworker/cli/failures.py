"""`qworker failures`: group failed messages by task and error."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from qworker.backend.each_queue import can_be_of_one_queue, describe_problem
from qworker.cli.filters import filter_options
from qworker.cli.options import URLCommand, backend_from_url, json_option, limit_option, run
from qworker.cli.output import echo, format_time, print_json, print_problems, print_table
from qworker.errors import BackendError, QueueNotFound
from qworker.failures.bulk import count_groups
from qworker.failures.groups import GroupCounts
from qworker.failures.message_filter import MessageFilter
from qworker.names import check_existing_queue, counted

__all__ = ["command"]

# The groups of each queue, the largest first.
_Groups = dict[str, list[GroupCounts]]


@click.command("failures", cls=URLCommand)
@click.argument("url")
@click.argument("queue", required=False, type=check_existing_queue)
@filter_options
@limit_option("Maximum number of groups of each queue.")
@json_option
def command(url: str, queue: str | None, matching: MessageFilter, limit: int, json: bool) -> None:
    r"""Group the failed messages of one queue or of all queues.

    A group has the same task and the same first line of the error, apart from quoted text, numbers and ids. It is shown
    with its number of messages, the times of the first and the last failure, and the id of the last one. `qworker
    requeue`, `remove`, `browse` and `export` take a group as --group. If a queue cannot be used, the reason is on
    standard error.

    \b
    Examples:
      qworker failures file://./spool
      qworker failures file://./spool thumbs --since 2h
      qworker failures file://./spool thumbs --code poison --json
    """
    groups, problems = run(_count(url, queue, matching))
    rows = [(name, one) for name, found in groups.items() for one in found[:limit]]
    if json:
        print_json([_to_json(name, one) for name, one in rows])
    elif rows:
        _show(rows, one_queue=queue is not None)
        more = sum(len(found[limit:]) for found in groups.values())
        if more:
            echo(f"{counted(more, 'more group')}: add --limit to show them")
    else:
        where = "" if queue is None else f" in {queue}"
        echo(f"nothing failed{where}" if matching.is_empty else f"no failed message matches{where}")
    print_problems(problems)


async def _count(url: str, queue: str | None, matching: MessageFilter) -> tuple[_Groups, dict[str, str | None]]:
    async with backend_from_url(url) as backend:
        if queue is not None:
            return {queue: await count_groups(backend, queue, matching)}, {}
        found: _Groups = {}
        problems: dict[str, str | None] = {}
        for name in await backend.queues():
            try:
                found[name] = await count_groups(backend, name, matching)
            except QueueNotFound:
                # The queue was deleted after it was listed.
                continue
            except (BackendError, OSError) as error:
                if not can_be_of_one_queue(backend, error):
                    raise
                problems[name] = describe_problem(error)
        return found, problems


def _to_json(queue: str, counts: GroupCounts) -> dict[str, Any]:
    group = counts.group
    data: dict[str, Any] = {"queue": queue, "group": None, "task": None, "code": None, "error_type": "", "error": ""}
    if group is not None:
        data |= msgspec.structs.asdict(group)
        data["group"] = data.pop("key")
    data |= {"count": counts.count, "first_at": counts.first_at, "last_at": counts.last_at}
    return data | {"example": counts.example}


def _show(rows: list[tuple[str, GroupCounts]], *, one_queue: bool) -> None:
    skip = 1 if one_queue else 0
    headings = ("queue", "count", "group", "task", "code", "first", "last", "example", "error")
    print_table(headings[skip:], [_row(*row)[skip:] for row in rows], texts=("error",))


def _row(queue: str, counts: GroupCounts) -> tuple[str, ...]:
    group = counts.group
    what = ("-", "-", "-") if group is None else (group.key, group.task or "(raw)", group.code)
    times = (format_time(counts.first_at), format_time(counts.last_at))
    return (queue, f"{counts.count:,}", *what, *times, counts.example, "(others)" if group is None else group.error)
