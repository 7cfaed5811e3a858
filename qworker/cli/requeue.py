"""`qworker requeue`: failed messages get another chance."""

from __future__ import annotations

import click

from qworker.cli.common import URLCommand, json_option, opened, run
from qworker.cli.output import print_json, say
from qworker.names import check_queue

__all__ = ["command"]


@click.command("requeue", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_queue)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@json_option
def command(url: str, queue: str, ids: tuple[str, ...], json: bool) -> None:
    r"""Make failed messages of QUEUE ready again with tries 0: those with the IDs given, or all.

    \b
    Examples:
      qworker requeue file://./spool thumbs
      qworker requeue file://./spool thumbs 20261121071038_123456789_4242_host-7f3a9b21
    """
    count = run(_requeue(url, queue, ids))
    if json:
        print_json({"queue": queue, "requeued": count})
    else:
        say(f"requeued {count:,} messages of {queue}")


async def _requeue(url: str, queue: str, ids: tuple[str, ...]) -> int:
    async with opened(url) as backend:
        return await backend.requeue(queue, ids or None)
