"""`qworker stats`: count messages by state."""

from __future__ import annotations

import click
import msgspec

from qworker.backend.each_queue import count_queues
from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, format_seconds, print_json, print_problems, print_table
from qworker.errors import BackendError
from qworker.jobs.kept import MOST_COUNTED, count_kept
from qworker.logs import one_line
from qworker.message import QueueStats
from qworker.names import check_existing_queue, counted

__all__ = ["command"]

_NOUNS = {
    "schedules": "schedule",
    "results": "result",
    "progress": "progress report",
    "cancels": "unfinished cancel",
}


@click.command("stats", cls=URLCommand)
@click.argument("url")
@click.argument("queue", required=False, type=check_existing_queue)
@json_option
def command(url: str, queue: str | None, json: bool) -> None:
    r"""Count the messages of one queue or of all queues.

    ready: can be leased now. leased: a worker runs it. delayed: due later, retries included. failed: will not run
    again, and is kept for `qworker requeue`. done: acked and still kept. oldest: how long the oldest ready message has
    waited. If a queue cannot be used, the reason is on standard error.

    For one queue, also kept: schedules, the results and the progress of jobs, and cancels that are not finished. At
    most 1,000 of each are counted. If these cannot be read, the reason is on standard error.

    \b
    Examples:
      qworker stats file://./spool
      qworker stats file://./spool thumbs --json
    """
    found, kept, problem = run(_stats(url, queue))
    if json:
        more = {"kept": kept} if kept else {}
        print_json(msgspec.to_builtins(found[0]) | more if queue is not None else found)
    elif found:
        _show(found, queue is not None)
        if kept:
            echo("also kept: " + ", ".join(_kept(word, count) for word, count in kept.items()))
    else:
        echo("no queues yet: `qworker run`, `enqueue` or `create` creates them")
    if problem is not None:
        echo(f"queue {queue}: what it also keeps cannot be read: {problem}", err=True)


async def _stats(url: str, queue: str | None) -> tuple[list[QueueStats], dict[str, int], str | None]:
    """Return the counts of queues, what one queue also keeps, and why that cannot be read."""
    async with backend_from_url(url) as backend:
        if queue is None:
            return await count_queues(backend, await backend.queues()), {}, None
        found = [await backend.stats(queue)]
        try:
            return found, await count_kept(backend, queue), None
        except BackendError as error:
            return found, {}, one_line(str(error))


def _kept(word: str, count: int) -> str:
    what = counted(count, _NOUNS[word])
    return f"{what} or more" if count == MOST_COUNTED else what


def _show(found: list[QueueStats], one: bool) -> None:
    headings = ("queue", "ready", "leased", "delayed", "failed", "done", "oldest", "")
    rows = [
        (
            s.queue,
            *(f"{n:,}" if s.problem is None else "?" for n in (s.ready, s.leased, s.delayed, s.failed, s.done)),
            format_seconds(s.oldest_age_s),
            _note(s),
        )
        for s in found
    ]
    print_table(headings, rows)
    print_problems({one.queue: one.problem for one in found})
    if one and found[0].retention:
        echo("retention: " + "; ".join(f"{what}: {how_long}" for what, how_long in found[0].retention.items()))


def _note(stats: QueueStats) -> str:
    if stats.problem is not None:
        return "cannot be used"
    notes = ["paused"] if stats.paused else []
    if stats.blocked:
        notes.append(f"{stats.blocked:,} blocked: see `qworker doctor`")
    return ", ".join(notes)
