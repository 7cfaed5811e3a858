"""`qworker export`: print messages as JSON lines."""

from __future__ import annotations

import click

from qworker.cli.filters import filter_options, states_of
from qworker.cli.options import URLCommand, backend_from_url, run, state_option
from qworker.cli.output import echo, print_json
from qworker.failures.bulk import browse_matching
from qworker.failures.message_filter import MessageFilter
from qworker.message import State
from qworker.names import check_existing_queue

__all__ = ["command"]


@click.command("export", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@state_option("Export only messages in this state.")
@filter_options
def command(url: str, queue: str, state: str | None, matching: MessageFilter) -> None:
    r"""Print the messages of a queue as JSON lines.

    The messages come in any order and are not changed. They are read page by page, so a queue of any size needs little
    memory. A message that moves to another state meanwhile can be missing or be printed twice.

    \b
    Examples:
      qworker export file://./spool thumbs > thumbs.jsonl
      qworker export file://./spool thumbs --state failed --task thumbnail --since 2026-11-23
    """
    if not run(_export(url, queue, states_of(state, matching), matching)):
        echo(f"no message {'is stored' if matching.is_empty else 'matches'} in {queue}", err=True)


async def _export(url: str, queue: str, states: list[State], matching: MessageFilter) -> int:
    count = 0
    async with backend_from_url(url) as backend:
        for state in states:
            async for found in browse_matching(backend, queue, state, matching):
                count += len(found)
                for stored in found:
                    print_json(stored.to_text_json())
    return count
