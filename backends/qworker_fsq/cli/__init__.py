"""`qworker fsq`: fsq's programs. Their exit statuses are fsq's: 0, 100 for wrong usage, 111 for the rest."""

from __future__ import annotations

import click

from qworker.cli.options import Group

__all__ = ["command"]

_COMMANDS = {
    "install": "qworker_fsq.cli.queues:install_command",
    "down": "qworker_fsq.cli.queues:down_command",
    "up": "qworker_fsq.cli.queues:up_command",
    "add-host": "qworker_fsq.cli.hosts:add_host_command",
    "rm-host": "qworker_fsq.cli.hosts:rm_host_command",
    "up-host": "qworker_fsq.cli.hosts:up_host_command",
    "down-host": "qworker_fsq.cli.hosts:down_host_command",
    "host-dist": "qworker_fsq.cli.hosts:host_dist_command",
    "push": "qworker_fsq.cli.remote:push_command",
    "jsonrpcd": "qworker_fsq.cli.remote:jsonrpcd_command",
}


@click.group("fsq", cls=Group, places=_COMMANDS)
def command() -> None:
    r"""Run fsq's programs on the queues of a directory.

    URL is fsq:///DIRECTORY; fsq: alone is FSQ_ROOT. Exit status: 0 for success, 100 for wrong usage, 111 for every
    other failure.

    \b
    Examples:
      qworker fsq install -t -a web1 -a web2 fsq:///var/fsq thumbs
      qworker fsq host-dist fsq:///var/fsq thumbs
      qworker fsq jsonrpcd fsq:///var/fsq 127.0.0.1 8080
    """
