"""`qworker fsq install`, `down` and `up`: create, pause and resume queues as fsq's own programs do."""

from __future__ import annotations

import os

import click

from qworker.names import check_existing_queue, check_queue
from qworker.url import BackendURL
from qworker_fsq.cli.common import FsqCommand, open_fsq_root, owner_options, print_if
from qworker_fsq.layout import Install, QueueExists, install, require_queue, uninstall
from qworker_fsq.options import FsqOptions, check_host, parse_root

__all__ = ["down_command", "install_command", "up_command"]

_QUEUES = click.argument("queues", type=check_existing_queue, nargs=-1, required=True, metavar="QUEUE...")
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print each step.")


@click.command("install", cls=FsqCommand)
@click.argument("url")
@click.argument("queues", type=check_queue, nargs=-1, required=True, metavar="QUEUE...")
@click.option("-d", "--down", is_flag=True, help="Install each QUEUE paused, until `qworker fsq up`.")
@click.option(
    "-i", "--ignore-exists", is_flag=True, help="Skip a QUEUE that exists. Without this option, it is an error."
)
@click.option("-f", "--force", is_flag=True, help="Remove a QUEUE that exists first, with all its items.")
@click.option("-t", "--triggered", is_flag=True, help="Add a trigger for the queue, and one for its hosts.")
@click.option("-a", "--add-host", "hosts", multiple=True, metavar="HOST", help="Add a sub-queue for HOST; repeatable.")
@owner_options
@_VERBOSE
def install_command(
    url: str,
    queues: tuple[str, ...],
    down: bool,
    ignore_exists: bool,
    force: bool,
    triggered: bool,
    hosts: tuple[str, ...],
    owner: str | None,
    group: str | None,
    mode: str | None,
    verbose: bool,
) -> None:
    r"""Install queues as fsq does.

    `qworker create` makes queues on every backend. This command has the options of fsq.

    \b
    Example:
      qworker fsq install -t -a web1 -a web2 fsq:///var/fsq thumbs
    """
    report = print_if(verbose)
    how = Install(down=down, triggered=triggered, hosts=tuple(check_host(host) for host in hosts))
    owners = {"item_user": owner, "queue_user": owner, "item_group": group, "queue_group": group}
    _make_root(url)
    with open_fsq_root(url, **owners, item_mode=mode, queue_mode=mode) as root:
        for queue in queues:
            report(f"installing {queue}")
            try:
                install(root.fd, queue, root.constants, how)
            except QueueExists:
                if force:
                    uninstall(root.fd, queue, root.constants)
                    install(root.fd, queue, root.constants, how)
                elif ignore_exists:
                    report(f"skipping {queue}; already installed")
                else:
                    raise


def _make_root(url: str) -> None:
    parsed = BackendURL.parse(url)
    if parsed.scheme == "fsq":
        os.makedirs(parse_root(parsed, FsqOptions.from_url(parsed).constants), 0o775, exist_ok=True)


@click.command("down", cls=FsqCommand)
@click.argument("url")
@_QUEUES
@owner_options
@_VERBOSE
def down_command(
    url: str, queues: tuple[str, ...], owner: str | None, group: str | None, mode: str | None, verbose: bool
) -> None:
    r"""Pause queues as fsq does.

    Items of each QUEUE and of the sub-queues of its hosts are not taken until `qworker fsq up`.

    \b
    Example:
      qworker fsq down fsq:///var/fsq thumbs
    """
    with open_fsq_root(url, item_user=owner, item_group=group, item_mode=mode) as root:
        for queue in queues:
            print_if(verbose)(f"downing {queue}")
            files = require_queue(root.fd, queue, root.constants)
            try:
                files.down()
            finally:
                files.close()


@click.command("up", cls=FsqCommand)
@click.argument("url")
@_QUEUES
@_VERBOSE
def up_command(url: str, queues: tuple[str, ...], verbose: bool) -> None:
    r"""Resume queues as fsq does.

    \b
    Example:
      qworker fsq up fsq:///var/fsq thumbs
    """
    with open_fsq_root(url) as root:
        for queue in queues:
            print_if(verbose)(f"upping {queue}")
            files = require_queue(root.fd, queue, root.constants)
            try:
                files.up()
                files.pull_trigger()
            finally:
                files.close()
