"""`qworker history`: print the newest events."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import click

from qworker.cli.options import URLCommand, backend_from_url, json_option, moment_type, run
from qworker.cli.output import echo, format_seconds, print_json
from qworker.history.event import KINDS, Event
from qworker.history.query import EventFilter, read_newest
from qworker.history.query import follow as following_events
from qworker.names import check_existing_queue, to_message_id

__all__ = ["command", "event_line"]

# Seconds between two reads with `--follow`.
_LOOK = 0.5


@click.command("history", cls=URLCommand)
@click.argument("url")
@click.argument("queue", required=False, type=check_existing_queue)
@click.option("--id", "id", metavar="ID", type=to_message_id, help="Show only events of the message with this id.")
@click.option("--event", multiple=True, type=click.Choice(KINDS), help="Show only events of this kind; repeatable.")
@click.option(
    "--since",
    type=moment_type,
    metavar="TIME",
    help="Show only events since then: an age such as 2h, or a time such as 2026-11-23T08:00 (UTC).",
)
@click.option(
    "-n",
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="Maximum number of events.",
)
@click.option(
    "-f", "--follow", is_flag=True, help="Continue to print events as they happen. With --json, one line each."
)
@click.option("--all", is_flag=True, help="Show `extended` events too: one for each time that a lease is extended.")
@json_option
def command(
    url: str,
    queue: str | None,
    id: str | None,  # noqa: A002
    event: tuple[str, ...],
    since: float | None,
    limit: int,
    follow: bool,
    all: bool,  # noqa: A002
    json: bool,
) -> None:
    r"""Print the newest events of one queue or of all queues.

    The oldest of them is printed first. Workers record what they do: enqueued (when a worker first sees a message),
    leased, extended, retried, failed, acked, released, lost. A long task has an `extended` event every few seconds:
    these are shown only with --event extended or --all.

    \b
    Examples:
      qworker history file://./spool
      qworker history file://./spool thumbs --event failed --event retried --since 2h
      qworker history file://./spool thumbs --id 20261121071038_123456789_4242_host-7f3a9b21 --json
      qworker history redis://localhost/0 -f
    """
    wanted = EventFilter(
        queue=queue,
        id=id,
        kinds=_kinds(event, all),
        since=since,
    )
    run(_print(url, wanted, limit, follow, json))


def _kinds(chosen: tuple[str, ...], everything: bool) -> frozenset[str] | None:
    """Return the kinds of events to show, or None for all kinds.

    A long task has thousands of `extended` events, so they are shown only on request.
    """
    if chosen:
        return frozenset(chosen)
    return None if everything else frozenset(KINDS) - {"extended"}


async def _print(url: str, wanted: EventFilter, limit: int, following: bool, json: bool) -> None:
    async with backend_from_url(url) as backend:
        if not backend.history.enabled and not await backend.history.logs():
            echo("the history is off here: add ?history=1 to the URL of the workers", err=True)
        found, ends = await read_newest(backend.history, wanted, limit)
        if following:
            _print_each(found, json)
            async for more in following_events(backend.history, wanted, ends):
                _print_each(more, json)
                await asyncio.sleep(_LOOK)
        elif json:
            print_json(found)
        else:
            _print_each(found, json)


def _print_each(found: list[Event], json: bool) -> None:
    for event in found:
        if json:
            print_json(event)
        else:
            echo(event_line(event))


def event_line(event: Event) -> str:
    """Return an event as one line of text."""
    at = datetime.fromtimestamp(event.at, UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
    words = [at, f"{event.kind:<8}", event.queue, event.id, event.task or "(raw)"]
    if event.tries:
        words.append(f"tries {event.tries}")
    if event.duration_s is not None:
        words.append(f"ran {format_seconds(event.duration_s)}")
    if event.kind != "enqueued":
        words.append(f"by {event.worker}")
    if event.error:
        words.append(f": {event.error}")
    return "  ".join(words)
