"""`qworker create`: create queues."""

from __future__ import annotations

import click

from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json
from qworker.names import check_existing_queue

__all__ = ["command"]


@click.command("create", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_existing_queue, nargs=-1, required=True, metavar="QUEUE...")
@click.option("--paused", is_flag=True, help="Pause each QUEUE, until `qworker resume`.")
@json_option
def command(url: str, queues: tuple[str, ...], paused: bool, json: bool) -> None:
    r"""Create queues that do not exist.

    `qworker run`, `enqueue` and `publish` create queues themselves. For `fsq:`, `qworker fsq install` has more options.

    \b
    Example:
      qworker create file:///var/spool/app inbox thumbs
    """
    run(_create(url, queues, paused=paused))
    if json:
        print_json([{"queue": queue} for queue in queues])
        return
    for queue in queues:
        echo(f"{queue} exists")


async def _create(url: str, queues: tuple[str, ...], *, paused: bool) -> None:
    async with backend_from_url(url, make=True) as backend:
        for queue in queues:
            await backend.create(queue)
            if paused:
                await backend.pause(queue)
