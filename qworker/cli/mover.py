"""`qworker mover` and `qworker reaper`: mq's daemons, for roots whose servers run without them."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import click

from qworker import logs
from qworker.cli.common import Command
from qworker.errors import UsageError
from qworker.http.daemons import Mover, Reaper, open_source, run_daemon

__all__ = ["duration", "mover_command", "reaper_command"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Seconds of `500ms`, `30`, `30s`, `5m`, `2h`, `1d`.

    Raises:
        UsageError: it is none.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no duration: write 500ms, 30s, 5m, 2h or 1d; a bare number is seconds")
    return float(found[1]) * _SECONDS[found[2]]


@click.command("mover", cls=Command)
@click.option("--source", required=True, type=click.Path(path_type=Path), help="Directory of <queue>:<id> files.")
@click.option("--destination", required=True, type=click.Path(path_type=Path), help="Directory of queues.")
@click.option("--delay", default="0", show_default=True, help="How long a file stays: 500ms, 30s, 5m; bare: seconds.")
def mover_command(source: Path, destination: Path, delay: str) -> None:
    r"""Move the messages of an mq root from SOURCE to the queues of DESTINATION, now and as they come.

    \b
    Example:
      qworker mover --source /var/mq/new --destination /var/mq/queues
      qworker mover --source /var/mq/delay --destination /var/mq/queues --delay 30s
    """
    seconds = duration(delay)
    logs.configure()
    opened = open_source(source)
    try:
        target = open_source(destination)
        try:
            asyncio.run(run_daemon(Mover(opened, target, seconds), opened))
        finally:
            os.close(target)
    finally:
        os.close(opened)


@click.command("reaper", cls=Command)
@click.option("--source", required=True, type=click.Path(path_type=Path), help="Directory of removed messages.")
def reaper_command(source: Path) -> None:
    r"""Unlink the removed messages of an mq root, now and as they come.

    \b
    Example:
      qworker reaper --source /var/mq/remove
    """
    logs.configure()
    opened = open_source(source)
    try:
        asyncio.run(run_daemon(Reaper(opened), opened))
    finally:
        os.close(opened)
