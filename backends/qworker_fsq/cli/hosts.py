"""`qworker fsq add-host`, `rm-host`, `up-host`, `down-host` and `host-dist`: the sub-queues of hosts."""

from __future__ import annotations

import click

from qworker.backend.scan_source import ScanOptions
from qworker.cli.options import exit_code_options, item_limit_options
from qworker.errors import QueueNotFound
from qworker.names import check_existing_queue
from qworker.url import BackendURL
from qworker_fsq.cli.common import FsqCommand, open_fsq_root, owner_options, print_if, print_warning
from qworker_fsq.host_dist import Distribution, distribute
from qworker_fsq.layout import QueueExists, install_host, require_queue, uninstall
from qworker_fsq.options import check_host
from qworker_fsq.scan import open_scan

__all__ = ["add_host_command", "down_host_command", "host_dist_command", "rm_host_command", "up_host_command"]

_QUEUES = click.argument("queues", type=check_existing_queue, nargs=-1, required=True, metavar="QUEUE...")
_HOST = click.argument("host", type=check_host)
_VERBOSE = click.option("-v", "--verbose", is_flag=True, help="Print each step.")


@click.command("add-host", cls=FsqCommand)
@click.argument("url")
@_HOST
@_QUEUES
@click.option("-f", "--force", is_flag=True, help="Remove an existing sub-queue first, with all its items.")
@click.option(
    "-i", "--ignore-exists", is_flag=True, help="Skip a sub-queue that exists. Without this option, it is an error."
)
@owner_options
@_VERBOSE
def add_host_command(
    url: str,
    host: str,
    queues: tuple[str, ...],
    force: bool,
    ignore_exists: bool,
    owner: str | None,
    group: str | None,
    mode: str | None,
    verbose: bool,
) -> None:
    r"""Add a sub-queue for HOST to each QUEUE.

    \b
    Example:
      qworker fsq add-host fsq:///var/fsq web1 thumbs
    """
    report = print_if(verbose)
    owners = {"item_user": owner, "queue_user": owner, "item_group": group, "queue_group": group}
    with open_fsq_root(url, **owners, item_mode=mode, queue_mode=mode) as root:
        for queue in queues:
            report(f"installing host {host} to {queue}")
            try:
                install_host(root.fd, queue, root.constants, (host,))
            except QueueExists:
                if force:
                    uninstall(root.fd, queue, root.constants, host)
                    install_host(root.fd, queue, root.constants, (host,))
                elif ignore_exists:
                    report(f"skipping {queue}; already installed")
                else:
                    raise


@click.command("rm-host", cls=FsqCommand)
@click.argument("url")
@_HOST
@_QUEUES
@click.option("-f", "--force", is_flag=True, help="Skip queues without such a sub-queue.")
@_VERBOSE
def rm_host_command(url: str, host: str, queues: tuple[str, ...], force: bool, verbose: bool) -> None:
    r"""Remove the sub-queue of HOST from each QUEUE, with all its items.

    \b
    Example:
      qworker fsq rm-host fsq:///var/fsq web1 thumbs
    """
    report = print_if(verbose)
    with open_fsq_root(url) as root:
        for queue in queues:
            report(f"removing host {host} for queue {queue}")
            try:
                uninstall(root.fd, queue, root.constants, host)
            except QueueNotFound:
                if not force:
                    raise


@click.command("down-host", cls=FsqCommand)
@click.argument("url")
@_HOST
@_QUEUES
@owner_options
@_VERBOSE
def down_host_command(
    url: str,
    host: str,
    queues: tuple[str, ...],
    owner: str | None,
    group: str | None,
    mode: str | None,
    verbose: bool,
) -> None:
    r"""Pause the sub-queue of HOST in each QUEUE.

    Its items are not taken until `qworker fsq up-host`.

    \b
    Example:
      qworker fsq down-host fsq:///var/fsq web1 thumbs
    """
    with open_fsq_root(url, item_user=owner, item_group=group, item_mode=mode) as root:
        for queue in queues:
            print_if(verbose)(f"downing host {host} for queue {queue}")
            files = require_queue(root.fd, queue, root.constants, host)
            try:
                files.down()
            finally:
                files.close()


@click.command("up-host", cls=FsqCommand)
@click.argument("url")
@_HOST
@_QUEUES
@_VERBOSE
def up_host_command(url: str, host: str, queues: tuple[str, ...], verbose: bool) -> None:
    r"""Resume the sub-queue of HOST in each QUEUE.

    \b
    Example:
      qworker fsq up-host fsq:///var/fsq web1 thumbs
    """
    with open_fsq_root(url) as root:
        for queue in queues:
            print_if(verbose)(f"upping host {host} for queue {queue}")
            files = require_queue(root.fd, queue, root.constants, host)
            try:
                files.up()
            finally:
                files.close()


@click.command("host-dist", cls=FsqCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.argument("hosts", type=check_host, nargs=-1, metavar="[HOST]...")
@click.option("-I", "--link", is_flag=True, help="Link the same file into each sub-queue, instead of copying it.")
@click.option("-g", "--trigger", is_flag=True, help="Pull the trigger of the hosts after each item.")
@click.option("-n", "--no-open", is_flag=True, help="Accepted as by fsq, without effect.")
@click.option("-i", "--ignore-down", is_flag=True, help="Distribute from a paused queue too.")
@click.option("-l", "--lock", is_flag=True, help="Lock each item during its distribution (the default).")
@click.option("-L", "--no-lock", is_flag=True, help="Do not lock items.")
@click.option("-D", "--no-done", is_flag=True, help="Leave each item in the queue.")
@item_limit_options
@exit_code_options
@_VERBOSE
def host_dist_command(
    url: str,
    queue: str,
    hosts: tuple[str, ...],
    link: bool,
    trigger: bool,
    no_open: bool,
    ignore_down: bool,
    lock: bool,
    no_lock: bool,
    no_done: bool,
    ttl: float | None,
    max_tries: int | None,
    success_code: int | None,
    fail_tmp_code: int | None,
    fail_perm_code: int | None,
    verbose: bool,
) -> int:
    r"""Distribute the items of a queue to the sub-queues of its hosts.

    Each item of QUEUE is enqueued in the sub-queue of each HOST, or of all its hosts. Then the item is done.

    \b
    Example:
      qworker fsq host-dist fsq:///var/fsq thumbs
      qworker fsq host-dist -g fsq:///var/fsq thumbs web1 web2
    """
    del no_open
    options = ScanOptions(
        ignore_down=ignore_down,
        lock=False if no_lock else (True if lock else None),
        ttl=ttl,
        max_tries=max_tries,
        success=success_code,
        fail_tmp=fail_tmp_code,
        fail_perm=fail_perm_code,
    )
    with open_fsq_root(url) as root:
        source = open_scan(BackendURL.parse(url), queue, options)
        try:
            how = Distribution(link=link, trigger=trigger, verbose=verbose, done=not no_done)
            return distribute(root.fd, queue, hosts, source, how, print_warning)
        finally:
            source.close()
