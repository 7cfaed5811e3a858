"""`qworker purge`: delete messages."""

from __future__ import annotations

import sys

import click

from qworker.cli.options import URLCommand, backend_from_url, json_option, run, state_option
from qworker.cli.output import echo, print_json
from qworker.errors import UsageError
from qworker.message import Selection, State
from qworker.names import check_existing_queue, counted

__all__ = ["command"]

# Delayed messages are first. If one becomes due meanwhile, it is deleted with the ready ones.
_PURGED = (State.DELAYED, State.READY, State.FAILED)


@click.command("purge", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@state_option("Delete only messages in this state.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@json_option
def command(url: str, queue: str, state: str | None, yes: bool, json: bool) -> None:
    r"""Delete messages of a queue permanently.

    Without --state, ready, delayed and failed messages are deleted, and leased and done ones stay. Asks for
    confirmation on a terminal, and needs --yes elsewhere. `qworker remove` deletes single messages, or some of the
    failed ones.

    \b
    Examples:
      qworker purge file://./spool thumbs --state failed
      qworker purge file://./spool thumbs --yes
    """
    chosen = None if state is None else State.of_word(state)
    if not yes:
        _ask(queue, state)
    count = run(_purge(url, queue, chosen))
    if json:
        print_json({"queue": queue, "purged": count})
    else:
        echo(f"purged {counted(count, 'message')} of {queue}")


def _ask(queue: str, state: str | None) -> None:
    if not sys.stdin.isatty():
        raise UsageError("purge deletes messages permanently: add --yes to confirm")
    click.confirm(
        f"Delete the {state or 'ready, delayed and failed'} messages of {queue} permanently?", abort=True, err=True
    )


async def _purge(url: str, queue: str, state: State | None) -> int:
    async with backend_from_url(url) as backend:
        return sum([await backend.remove(queue, Selection(state=one)) for one in ([state] if state else _PURGED)])
