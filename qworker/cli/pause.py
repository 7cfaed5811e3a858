"""`qworker pause` and `qworker resume`: stop and restart leasing from queues."""

from __future__ import annotations

import click

from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json
from qworker.names import check_existing_queue

__all__ = ["pause_command", "resume_command"]


@click.command("pause", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_existing_queue, nargs=-1, required=True, metavar="QUEUE...")
@json_option
def pause_command(url: str, queues: tuple[str, ...], json: bool) -> None:
    r"""Pause queues for all workers until `qworker resume`.

    Running handlers finish, and publishing still works.

    \b
    Example:
      qworker pause file://./spool thumbs
    """
    run(_set(url, queues, paused=True))
    _report(queues, True, json)


@click.command("resume", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_existing_queue, nargs=-1, required=True, metavar="QUEUE...")
@json_option
def resume_command(url: str, queues: tuple[str, ...], json: bool) -> None:
    r"""Resume queues that `qworker pause` has paused.

    \b
    Example:
      qworker resume file://./spool thumbs
    """
    run(_set(url, queues, paused=False))
    _report(queues, False, json)


async def _set(url: str, queues: tuple[str, ...], *, paused: bool) -> None:
    async with backend_from_url(url) as backend:
        for queue in queues:
            await (backend.pause(queue) if paused else backend.resume(queue))


def _report(queues: tuple[str, ...], paused: bool, json: bool) -> None:
    if json:
        print_json([{"queue": queue, "paused": paused} for queue in queues])
        return
    for queue in queues:
        echo(f"{queue} is {'paused: nothing is leased from it until `qworker resume`' if paused else 'resumed'}")
