"""`qworker down` and `qworker up`: pause a queue for every consumer, and resume it."""

from __future__ import annotations

import click

from qworker.cli.common import URLCommand, json_option, opened, run
from qworker.cli.output import print_json, say
from qworker.names import check_queue

__all__ = ["down_command", "up_command"]


@click.command("down", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_queue, nargs=-1, required=True, metavar="QUEUE...")
@json_option
def down_command(url: str, queues: tuple[str, ...], json: bool) -> None:
    r"""Pause each QUEUE for all consumers until `qworker up`. What runs goes on, and publishing still works.

    \b
    Example:
      qworker down file://./spool thumbs
    """
    run(_set(url, queues, down=True))
    _report(queues, True, json)


@click.command("up", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_queue, nargs=-1, required=True, metavar="QUEUE...")
@json_option
def up_command(url: str, queues: tuple[str, ...], json: bool) -> None:
    r"""Resume each QUEUE that `qworker down` has paused.

    \b
    Example:
      qworker up file://./spool thumbs
    """
    run(_set(url, queues, down=False))
    _report(queues, False, json)


async def _set(url: str, queues: tuple[str, ...], *, down: bool) -> None:
    async with opened(url) as backend:
        for queue in queues:
            await (backend.pause(queue) if down else backend.resume(queue))


def _report(queues: tuple[str, ...], down: bool, json: bool) -> None:
    if json:
        print_json([{"queue": queue, "down": down} for queue in queues])
        return
    for queue in queues:
        say(f"{queue} is {'down: nobody leases from it until `qworker up`' if down else 'up'}")
