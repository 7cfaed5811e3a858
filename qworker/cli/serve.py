"""`qworker serve`: serve mq's HTTP endpoints on any backend."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import AsyncExitStack

import click
import structlog

from qworker import logs
from qworker.backend.registry import open_backend
from qworker.cli.options import URLCommand, duration_type, listen_options, positive_number, size_type
from qworker.cli.ui import import_ui, mount_dashboard
from qworker.errors import InvalidURL
from qworker.extras import not_installed
from qworker.kit.gc_freeze import freeze_loaded_modules
from qworker.kit.network import is_loopback
from qworker.supervisor.event_loop import loop_factory

__all__ = ["command"]

log = structlog.get_logger()


@click.command("serve", cls=URLCommand)
@click.argument("url")
@listen_options(8080)
@click.option(
    "--visibility-timeout",
    type=duration_type(least=0.001),
    default="30s",
    show_default=True,
    help="Lease length of a fetched message.",
)
@click.option(
    "--max-body-size", metavar="BYTES", type=int, default=1 << 20, show_default=True, help="Maximum size of a message."
)
@click.option(
    "--memory",
    type=size_type(least=1 << 20),
    default="128MiB",
    show_default=True,
    help="Memory for the bodies of all running requests. Further requests wait, then get status 503.",
)
@click.option(
    "--max-connections",
    metavar="N",
    type=int,
    default=1000,
    show_default=True,
    help="Maximum number of connections. Another one takes the place of a connection that waits for its client.",
)
@click.option(
    "--connections-per-address",
    metavar="N",
    type=int,
    help="Maximum number of connections from one address. Without it, there is no limit.",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1),
    # QWORKER_WORKERS is the number of processes of `qworker run`.
    allow_from_autoenv=False,
    help=(
        "Number of fetches that run at the same time, as in mq: each queue belongs to one of N workers. "
        "Default: one worker for each queue."
    ),
)
@click.option("--ui", is_flag=True, help="Serve the dashboard below /-/ui/ too, with its own login (see `qworker ui`).")
def command(
    url: str,
    host: str,
    port: int,
    visibility_timeout: float,
    max_body_size: int,
    memory: int,
    max_connections: int,
    connections_per_address: int | None,
    workers: int | None,
    ui: bool,
) -> None:
    r"""Serve the queues of a backend over HTTP, as an mq server does.

    Clients must send the token in QWORKER_HTTP_TOKEN as "Authorization: Bearer TOKEN". Without a token, only this
    machine is served. Endpoints that mq does not have are under /-/, and described in /-/openapi.json.

    \b
    Example:
      qworker serve file:///var/spool/app --port 8080
      curl -d hello http://127.0.0.1:8080/inbox/messages
    """
    positive_number(max_body_size, "--max-body-size")
    positive_number(max_connections, "--max-connections")
    if connections_per_address is not None:
        positive_number(connections_per_address, "--connections-per-address")
    try:
        # `create_app` imports it for the additions, but only when the server starts.
        importlib.import_module("qworker.server.native_routes")
        from qworker.asgi.access import read_token, require_token_if_public
        from qworker.asgi.limits import limited_protocol
        from qworker.asgi.server import bind
        from qworker.server.app import create_app
        from qworker.server.server import serve
    except ModuleNotFoundError as error:
        raise not_installed(error, "qworker serve") from error
    token = read_token()
    require_token_if_public(host, token)
    if ui:
        import_ui("qworker serve --ui")
    logs.configure()

    async def run() -> None:
        backend = open_backend(url, remote_leases=True)
        if not backend.shared:
            raise InvalidURL(
                f"{backend.describe()}: queues exist only in the process that created them: use file: or redis:"
            )
        app = create_app(
            backend,
            token=token,
            body_limit=max_body_size,
            visibility_timeout=visibility_timeout,
            memory=memory,
            fetch_workers=workers,
        )
        listener = bind(host, port)
        address, bound = listener.getsockname()[:2]
        if backend.remote_leases is None:
            log.warning("leases_end_with_server", url=backend.describe())
        log.info("server_started", url=backend.describe(), address=f"http://{address}:{bound}", token=token is not None)
        limits = limited_protocol(most=max_connections, most_per_address=connections_per_address)
        async with AsyncExitStack() as stack:
            if ui:
                await mount_dashboard(stack, app, url, f"http://{host}:{bound}", is_loopback(host))
            freeze_loaded_modules()
            await serve(app, listener, protocol=limits)

    with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
        runner.run(run())
