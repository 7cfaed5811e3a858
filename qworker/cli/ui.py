"""`qworker ui`: serve the dashboard of a store."""

from __future__ import annotations

import asyncio
import importlib

import click
import structlog

from qworker import logs
from qworker.backend import Backend
from qworker.cli.app_loader import import_tasks, load_app
from qworker.cli.options import URLCommand, backend_from_url
from qworker.errors import MissingExtra, UsageError
from qworker.kit.network import is_loopback
from qworker.supervisor.event_loop import loop_factory

__all__ = ["command"]

log = structlog.get_logger()


@click.command("ui", cls=URLCommand)
@click.argument("url")
@click.option("--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", metavar="PORT", type=int, default=8081, show_default=True, help="Port to listen on. 0: a free port."
)
@click.option(
    "--allowed-host",
    metavar="NAME",
    multiple=True,
    help="Name in the browser's address bar, if it is not this machine's; repeatable.",
)
@click.option(
    "--root-path", metavar="PATH", default="", help="Path below which a proxy serves the pages, such as /queues."
)
@click.option("--app", metavar="MODULE:ATTRIBUTE", help="App that runs the messages. Pages say whether it can.")
def command(url: str, host: str, port: int, allowed_host: tuple[str, ...], root_path: str, app: str | None) -> None:
    r"""Serve a dashboard of the queues.

    The command prints a link that logs you in. It works once, and for 5 minutes. QWORKER_UI_TOKEN is a token with which
    admins can log in too, and QWORKER_UI_VIEW_TOKEN one for viewers, who see secrets in arguments masked.

    \b
    Examples:
      qworker ui file://./spool
      qworker ui redis://queue-host/0 --port 8090 --app app:tasks
      qworker ui file:///var/spool/app --host 0.0.0.0 --allowed-host queues.example.org
    """
    for module in ("itsdangerous", "jinja2", "starlette"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingExtra("ui", "qworker ui") from error
    from qworker.asgi.limits import limited_protocol
    from qworker.asgi.server import Server, bind
    from qworker.ui.access import Login, Secrets
    from qworker.ui.app import Dashboard, below
    from qworker.ui.watch import Watch

    if not is_loopback(host) and not allowed_host:
        raise UsageError(
            f"listening on {host} requires --allowed-host NAME: the name or address that browsers use for this machine"
        )
    if root_path and (not root_path.startswith("/") or root_path.endswith("/")):
        raise UsageError(f"--root-path must start with a slash, and not end with one (got {root_path!r})")
    login = Login(Secrets.from_environment())
    tasks = None if app is None else load_app(app)
    if tasks is not None:
        import_tasks(tasks)
    logs.configure()

    async def run() -> None:
        async with backend_from_url(url) as backend:
            listener = bind(host, port)
            bound = listener.getsockname()[1]
            name = allowed_host[0] if allowed_host else host
            address = f"http://{f'[{name}]' if ':' in name else name}:{bound}"

            async def opened() -> Backend:
                return backend

            def say(link: str) -> None:
                click.echo(f"Open this link to log in. It works once, within 5 minutes:\n  {address}{link}")

            watch = Watch(opened, url)
            dashboard = Dashboard(
                watch, login=login, hosts=frozenset(name.lower() for name in allowed_host), on_link=say, tasks=tasks
            )
            log.info("ui_started", url=backend.describe(), address=f"{address}{root_path}/")
            say(f"{root_path}/login?t={login.new_link()}")
            try:
                await Server(below(dashboard, root_path), limited_protocol()).serve(sockets=[listener])
            finally:
                listener.close()
                await dashboard.aclose()

    with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
        runner.run(run())
