"""`qworker ui`: serve the dashboard of a store."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import click
import structlog

from qworker import logs
from qworker.app import Tasks
from qworker.backend import Backend
from qworker.cli.app_loader import import_tasks, load_app
from qworker.cli.options import URLCommand, backend_from_url
from qworker.cli.output import echo
from qworker.errors import MissingExtra, UsageError
from qworker.kit.network import is_loopback
from qworker.supervisor.event_loop import loop_factory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from qworker.server.app import MqApp
    from qworker.ui.app import Dashboard

__all__ = ["command", "import_ui", "mount_dashboard"]

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
@click.option(
    "--app",
    metavar="MODULE:ATTRIBUTE",
    help="App that runs the messages. Pages say whether it can, and it checks edited arguments.",
)
@click.option("--read-only", is_flag=True, help="Show no actions, and refuse all changes.")
def command(
    url: str,
    host: str,
    port: int,
    allowed_host: tuple[str, ...],
    root_path: str,
    app: str | None,
    read_only: bool,
) -> None:
    r"""Serve a dashboard of the queues.

    The command prints a link that logs you in. It works once, and for 5 minutes. QWORKER_UI_TOKEN is a token with which
    admins can log in too, and QWORKER_UI_VIEW_TOKEN one for viewers, who see secrets in arguments masked.

    \b
    Examples:
      qworker ui file://./spool
      qworker ui redis://queue-host/0 --port 8090 --app app:tasks
      qworker ui file:///var/spool/app --host 0.0.0.0 --allowed-host queues.example.org
    """
    import_ui("qworker ui")
    if not is_loopback(host) and not allowed_host:
        raise UsageError(
            f"listening on {host} requires --allowed-host NAME: the name or address that browsers use for this machine"
        )
    if root_path and (not root_path.startswith("/") or root_path.endswith("/")):
        raise UsageError(f"--root-path must start with a slash, and not end with one (got {root_path!r})")
    tasks = None if app is None else load_app(app)
    if tasks is not None:
        import_tasks(tasks)
    logs.configure()
    with asyncio.Runner(loop_factory=loop_factory("auto")) as runner:
        names = [name.lower() for name in allowed_host]
        runner.run(_serve(url, host, port, names, root_path, tasks, read_only=read_only))


def import_ui(needed_for: str) -> None:
    """Import the modules of the extra `ui`.

    Raises:
        MissingExtra: One is not installed.
    """
    for module in ("itsdangerous", "jinja2", "starlette"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise MissingExtra("ui", needed_for) from error


async def mount_dashboard(stack: AsyncExitStack, app: MqApp, url: str, address: str, is_local: bool) -> None:
    """Serve a dashboard next to the endpoints of `qworker serve`, until the stack is closed.

    Args:
        stack: What closes it.
        app: The server, whose backend it reads.
        url: The URL of the backend.
        address: The beginning of the server's URL.
        is_local: Whether only this machine can connect. Otherwise any name of the server is accepted.
    """
    from qworker.server.app import UI_PATH

    dashboard = _Opened(app.backend, url, address, frozenset() if is_local else None)
    app.mount_ui(await stack.enter_async_context(dashboard.serving(None)))
    dashboard.show_link(UI_PATH)


async def _serve(
    url: str, host: str, port: int, names: list[str], root_path: str, tasks: Tasks | None, *, read_only: bool
) -> None:
    from qworker.asgi.limits import limited_protocol
    from qworker.asgi.server import Server, bind
    from qworker.ui.app import below

    async with backend_from_url(url) as backend:
        listener = bind(host, port)
        name = names[0] if names else host
        address = f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
        opened = _Opened(backend, url, address, frozenset(names))
        try:
            async with opened.serving(tasks, read_only=read_only) as dashboard:
                log.info("ui_started", url=backend.describe(), address=f"{address}{root_path}/")
                opened.show_link(root_path)
                await Server(below(dashboard, root_path), limited_protocol()).serve(sockets=[listener])
        finally:
            listener.close()


class _Opened:
    """The dashboard of an open backend, whose login links are printed.

    Args:
        backend: The open backend.
        url: Its URL.
        address: The beginning of the dashboard's URL, without its path.
        hosts: See `Dashboard`.
    """

    def __init__(self, backend: Backend, url: str, address: str, hosts: Collection[str] | None) -> None:
        from qworker.ui.access import Login, Secrets

        self._backend = backend
        self._url = url
        self._address = address
        self._hosts = hosts
        self._login = Login(Secrets.from_environment())

    @asynccontextmanager
    async def serving(self, tasks: Tasks | None, *, read_only: bool = False) -> AsyncGenerator[Dashboard]:
        """Return the dashboard, which is closed after the block."""
        from qworker.ui.app import Dashboard
        from qworker.ui.watch import Watch

        async def opened() -> Backend:
            return self._backend

        watch = Watch(opened, lambda: self._url)
        dashboard = Dashboard(
            watch, login=self._login, hosts=self._hosts, on_link=self._print, tasks=tasks, read_only=read_only
        )
        try:
            yield dashboard
        finally:
            await dashboard.aclose()

    def show_link(self, root_path: str) -> None:
        """Print a link that logs in."""
        self._print(f"{root_path}/login?t={self._login.new_link()}")

    def _print(self, link: str) -> None:
        echo("Open this link to log in. It works once, within 5 minutes:")
        echo(f"  {self._address}{link}")
