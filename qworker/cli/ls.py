"""`qworker ls`: list the queues of a backend."""

from __future__ import annotations

import click

from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json

__all__ = ["command"]


@click.command("ls", cls=URLCommand)
@click.argument("url")
@json_option
def command(url: str, json: bool) -> None:
    r"""List the queues of a backend, one per line.

    \b
    Examples:
      qworker ls file://./spool
      qworker ls redis://localhost/0 --json
    """
    names = run(_names(url))
    if json:
        print_json(names)
        return
    for name in names:
        echo(name)


async def _names(url: str) -> list[str]:
    async with backend_from_url(url) as backend:
        return await backend.queues()
