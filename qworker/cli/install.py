"""`qworker install`: make queues."""

from __future__ import annotations

import click

from qworker.cli.common import URLCommand, json_option, opened, run
from qworker.cli.output import print_json, say
from qworker.names import check_queue

__all__ = ["command"]


@click.command("install", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_queue, nargs=-1, required=True, metavar="QUEUE...")
@json_option
def command(url: str, queues: tuple[str, ...], json: bool) -> None:
    r"""Make each QUEUE that is not there yet. `qworker run` and publishing make theirs by themselves.

    \b
    Example:
      qworker install file:///var/spool/app inbox thumbs
    """
    run(_create(url, queues))
    if json:
        print_json([{"queue": queue} for queue in queues])
        return
    for queue in queues:
        say(f"{queue} is there")


async def _create(url: str, queues: tuple[str, ...]) -> None:
    async with opened(url) as backend:
        for queue in queues:
            await backend.create(queue)
