"""`qworker health`: check a worker, in containers without curl."""

from __future__ import annotations

import click

from qworker.cli.options import Command, duration_type
from qworker.cli.output import echo
from qworker.health.probe import fetch_page

__all__ = ["command"]

_OK = 200
_EXIT_UNHEALTHY = 1


@click.command("health", cls=Command)
@click.argument("address", envvar="QWORKER_HEALTH")
@click.option(
    "--page",
    type=click.Choice(["livez", "readyz", "stats", "metrics"]),
    default="livez",
    show_default=True,
    help="Page to request if ADDRESS has no path.",
)
@click.option(
    "--timeout", type=duration_type(least=0.001), default="1s", show_default=True, help="Time to wait for the answer."
)
def command(address: str, page: str, timeout: float) -> int:
    r"""Check a worker that runs with --health, and print its answer.

    ADDRESS is its HOST:PORT or a URL. Without it, QWORKER_HEALTH is used. /stats and /metrics are requested with the
    token in QWORKER_HTTP_TOKEN, if it is set. Exit status: 0 if healthy, 1 if unhealthy or unreachable.

    \b
    Examples:
      qworker health 127.0.0.1:9090
      qworker health 127.0.0.1:9090 --page readyz
      qworker health http://127.0.0.1:9090/stats
    """
    status, text = fetch_page(address, f"/{page}", timeout)
    for line in text.splitlines():
        echo(line)
    return 0 if status == _OK else _EXIT_UNHEALTHY
