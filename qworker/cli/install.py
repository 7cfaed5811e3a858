"""`qworker install`: make queues."""

from __future__ import annotations

import click

from qworker.cli.common import URLCommand, json_option, opened, run
from qworker.cli.output import print_json, say
from qworker.errors import NotSupported
from qworker.installing import InstallOptions, installer
from qworker.names import check_queue
from qworker.url import BackendURL

__all__ = ["command"]


@click.command("install", cls=URLCommand)
@click.argument("url")
@click.argument("queues", type=check_queue, nargs=-1, required=True, metavar="QUEUE...")
@click.option("-d", "--down", is_flag=True, help="Paused until `qworker up`.")
@click.option("-i", "--ignore-exists", is_flag=True, help="fsq: leave a QUEUE that is there, which else is an error.")
@click.option(
    "-f", "--force", is_flag=True, help="fsq: remove a QUEUE that is there, with all its items, and make it anew."
)
@click.option("-t", "--triggered", is_flag=True, help="fsq: with a trigger, and with one for the hosts.")
@click.option("-o", "--owner", metavar="USER", help="fsq: the owner, by name or number.")
@click.option("-g", "--group", metavar="GROUP", help="fsq: the group, by name or number.")
@click.option("-m", "--mode", metavar="MODE", help="fsq: the octal mode.")
@click.option(
    "-a", "--add-host", "hosts", multiple=True, metavar="HOST", help="fsq: with a sub-queue for HOST; repeatable."
)
@json_option
def command(
    url: str,
    queues: tuple[str, ...],
    down: bool,
    ignore_exists: bool,
    force: bool,
    triggered: bool,
    owner: str | None,
    group: str | None,
    mode: str | None,
    hosts: tuple[str, ...],
    json: bool,
) -> None:
    r"""Make each QUEUE that is not there yet. `qworker run` and publishing make theirs by themselves.

    \b
    Example:
      qworker install file:///var/spool/app inbox thumbs
      qworker install -t -a web1 -a web2 fsq:///var/fsq thumbs
    """
    options = InstallOptions(
        down=down,
        ignore_exists=ignore_exists,
        force=force,
        triggered=triggered,
        owner=owner,
        group=group,
        mode=mode,
        hosts=hosts,
    )
    parsed = BackendURL.parse(url)
    own = installer(parsed.scheme)
    if own is not None:
        for queue in queues:
            own(parsed, queue, options)
    elif options.special is not None:
        raise NotSupported(f"{parsed.scheme}: has no --{options.special}: that is for fsq:")
    else:
        run(_create(url, queues, down=down))
    if json:
        print_json([{"queue": queue} for queue in queues])
        return
    for queue in queues:
        say(f"{queue} is there")


async def _create(url: str, queues: tuple[str, ...], *, down: bool) -> None:
    async with opened(url, make=True) as backend:
        for queue in queues:
            await backend.create(queue)
            if down:
                await backend.pause(queue)
