"""`qworker stats`: count messages by state."""

from __future__ import annotations

import click

from qworker.backend.each_queue import count_queues
from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, format_seconds, print_json, print_problems, print_table
from qworker.message import QueueStats
from qworker.names import check_existing_queue

__all__ = ["command"]


@click.command("stats", cls=URLCommand)
@click.argument("url")
@click.argument("queue", required=False, type=check_existing_queue)
@json_option
def command(url: str, queue: str | None, json: bool) -> None:
    r"""Count the messages of one queue or of all queues.

    ready: can be leased now. leased: a worker runs it. delayed: due later, retries included. failed: will not run
    again, and is kept for `qworker requeue`. done: acked and still kept. oldest: how long the oldest ready message has
    waited. If a queue cannot be used, the reason is on standard error.

    \b
    Examples:
      qworker stats file://./spool
      qworker stats file://./spool thumbs --json
    """
    found = run(_stats(url, queue))
    if json:
        print_json(found[0] if queue is not None else found)
    elif found:
        _show(found, queue is not None)
    else:
        echo("no queues yet: `qworker run`, `enqueue` or `create` creates them")


async def _stats(url: str, queue: str | None) -> list[QueueStats]:
    async with backend_from_url(url) as backend:
        if queue is not None:
            return [await backend.stats(queue)]
        return await count_queues(backend, await backend.queues())


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
