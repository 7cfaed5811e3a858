"""`qworker ls`: list the queues of a backend."""

from __future__ import annotations

import click

from qworker.backend.each_queue import find_problem
from qworker.cli.options import URLCommand, backend_from_url, json_option, run
from qworker.cli.output import echo, print_json, print_problems

__all__ = ["command"]


@click.command("ls", cls=URLCommand)
@click.argument("url")
@json_option
def command(url: str, json: bool) -> None:
    r"""List the queues of a backend, one per line.

    If a queue cannot be used, the reason is on standard error.

    \b
    Examples:
      qworker ls file://./spool
      qworker ls redis://localhost/0 --json
    """
    found = run(_find(url))
    if json:
        print_json(list(found))
    else:
        for name in found:
            echo(name)
    print_problems(found)


async def _find(url: str) -> dict[str, str | None]:
    """Return the names of the queues, each with the reason if it cannot be used."""
    async with backend_from_url(url) as backend:
        return {name: await find_problem(backend, name) for name in await backend.queues()}
