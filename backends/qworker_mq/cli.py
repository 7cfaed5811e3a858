"""`qworker mq`: mq's daemons, for roots whose servers run without them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from qworker import logs
from qworker.cli.options import Command, Group, duration_type
from qworker_mq.daemon_processes import DelayedMover, FollowedDirectory, TrashCleaner, run_daemon

__all__ = ["command"]


@click.group("mq", cls=Group)
def command() -> None:
    r"""Run the daemons of mq on the directories of a root.

    `qworker serve` runs them itself, unless its URL has daemons=0.

    \b
    Examples:
      qworker mq mover --source /var/mq/new --destination /var/mq/queues
      qworker mq reaper --source /var/mq/remove
    """


@command.command("mover", cls=Command)
@click.option(
    "--source",
    default="/tmp/mq/new",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Directory of files named <queue>:<id>.",
)
@click.option(
    "--destination",
    default="/tmp/mq/queues",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Directory of queues.",
)
@click.option(
    "--delay", type=duration_type(), default="0s", show_default=True, help="Time that a file stays in SOURCE."
)
def mover_command(source: Path, destination: Path, delay: float) -> None:
    r"""Move the messages of an mq root to their queues.

    Moves what is in SOURCE, and what arrives there later, to the queues in DESTINATION. Runs until it is stopped.

    \b
    Example:
      qworker mq mover --source /var/mq/new --destination /var/mq/queues
      qworker mq mover --source /var/mq/delay --destination /var/mq/queues --delay 30s
    """
    logs.configure()
    asyncio.run(run_daemon(DelayedMover(FollowedDirectory(source), FollowedDirectory(destination), delay)))


@command.command("reaper", cls=Command)
@click.option(
    "--source",
    default="/tmp/mq/remove",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Directory of removed messages.",
)
def reaper_command(source: Path) -> None:
    r"""Delete the removed messages of an mq root.

    Deletes what is in SOURCE, and what arrives there later. Runs until it is stopped.

    \b
    Example:
      qworker mq reaper --source /var/mq/remove
    """
    logs.configure()
    asyncio.run(run_daemon(TrashCleaner(FollowedDirectory(source))))
