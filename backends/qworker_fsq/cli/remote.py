"""`qworker fsq push` and `qworker fsq jsonrpcd`: items from one host to another."""

from __future__ import annotations

import signal

import click

from qworker.errors import BackendError
from qworker.names import check_existing_queue
from qworker_fsq.cli.common import FsqCommand, open_fsq_root, print_if, print_warning
from qworker_fsq.environment import NO_LIMITS
from qworker_fsq.layout import QueueDir, require_queue
from qworker_fsq.lease import ClaimedItem, SkipReason, claim
from qworker_fsq.options import check_host
from qworker_fsq.requeue_item import check_item
from qworker_fsq.rpc.client import RemoteHost

__all__ = ["jsonrpcd_command", "push_command"]


@click.command("push", cls=FsqCommand)
@click.argument("url")
@click.argument("remote")
@click.argument("source", type=check_existing_queue)
@click.argument("target", type=check_existing_queue)
@click.argument("host")
@click.argument("items", nargs=-1, required=True, metavar="ITEM...")
@click.option("-p", "--protocol", type=click.Choice(["jsonrpc"]), default="jsonrpc", help="Protocol to use.")
@click.option(
    "-L", "--no-lock", is_flag=True, help="Do not lock the items. Use it under a scan, which has locked them."
)
@click.option("-t", "--trigger", is_flag=True, help="Pull the trigger of TARGET after each item.")
@click.option("-i", "--ignore-listener", is_flag=True, help="Succeed even if no process listens on the trigger.")
@click.option("-v", "--verbose", is_flag=True, help="Print each item that is pushed.")
def push_command(
    url: str,
    remote: str,
    source: str,
    target: str,
    host: str,
    items: tuple[str, ...],
    protocol: str,
    no_lock: bool,
    trigger: bool,
    ignore_listener: bool,
    verbose: bool,
) -> int:
    r"""Push items to a queue of another host.

    Each ITEM of the sub-queue of HOST in SOURCE is enqueued in the queue TARGET of another host, through its jsonrpcd
    at REMOTE: http://HOST:PORT, with x:TOKEN@ before HOST if it needs a token, or unix:///PATH. HOST is - for the items
    of SOURCE itself. The items stay where they are: run push under a scan, which acts on its exit status.

    \b
    Example:
      qworker fsq push fsq:///var/fsq http://web1:8080 thumbs thumbs web1 _20131005205643_0_25577_mss_0_a.png
      qworker scan -A web1 fsq: jobs sh -c 'qworker fsq push -L fsq: http://web1:8080 jobs jobs web1 "$FSQ_ITEM_ID"'
    """
    del protocol
    there = RemoteHost(remote)
    with open_fsq_root(url) as root:
        files = require_queue(root.fd, source, root.constants, None if host == "-" else check_host(host))
        try:
            for item in items:
                print_if(verbose)(f"pushing item {item} of {source} to {target} at {there.address}")
                _push(files, check_item(item, root.constants), target, there, lock=root.constants.lock and not no_lock)
                if trigger:
                    there.pull_trigger(target, root.constants.trigger, ignore_listener=ignore_listener)
        finally:
            files.close()
    return 0


def _push(files: QueueDir, item: str, target: str, there: RemoteHost, *, lock: bool) -> None:
    claimed = claim(files, item, NO_LIMITS, now=float("inf"), lock=lock)
    if not isinstance(claimed, ClaimedItem):
        why = "another process is working on it" if claimed is SkipReason.BUSY else "there is no such item"
        raise BackendError(f"{item}: {why}")
    try:
        there.enqueue(item, target, claimed.read(), files.constants.charset)
    finally:
        claimed.close()


@click.command("jsonrpcd", cls=FsqCommand)
@click.argument("url")
@click.argument("host")
@click.argument("port", type=click.IntRange(0, 65535))
@click.option(
    "-w",
    "--workers",
    metavar="N",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Maximum number of requests at once.",
)
@click.option(
    "--max-body-size",
    metavar="BYTES",
    type=click.IntRange(1),
    default=16 << 20,
    show_default=True,
    help="Maximum size of a request.",
)
@click.option("--insecure", is_flag=True, help="Let other machines enqueue without a token.")
@click.option("-v", "--verbose", is_flag=True, help="Print each request.")
def jsonrpcd_command(
    url: str, host: str, port: int, workers: int, max_body_size: int, insecure: bool, verbose: bool
) -> int:
    r"""Let other hosts push items to the queues here.

    HOST and PORT are the address to listen on. Clients, fsq's push or qworker's, must send the token in
    QWORKER_HTTP_TOKEN as the password of http://x:TOKEN@HOST:PORT. Without a token, only this machine is served, unless
    --insecure is given. No web page is served without a token.

    \b
    Example:
      qworker fsq jsonrpcd fsq:///var/fsq 127.0.0.1 8080
    """
    # `push` needs no HTTP server.
    import asyncio

    from qworker.asgi.access import read_token, require_token_if_public
    from qworker.asgi.server import bind
    from qworker_fsq.rpc.methods import RpcMethods
    from qworker_fsq.rpc.server import RpcApp, serve

    token = read_token()
    if not insecure:
        require_token_if_public(host, token, or_else="add --insecure. Without it, other machines could enqueue")
    with open_fsq_root(url) as root:
        methods = RpcMethods(root.directory, root.constants)
        app = RpcApp(
            methods,
            workers=workers,
            body_limit=max_body_size,
            token=token,
            public=insecure,
            say=print_warning if verbose else None,
        )
        listener = bind(host, port)
    # fsq's server restarts its children. This server has no children.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    print_warning(f"starting jsonrpcd server on: {host}:{listener.getsockname()[1]}")
    asyncio.run(serve(app, listener))
    return 0
