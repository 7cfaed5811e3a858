"""`qworker ui`: serve the dashboard of a store."""

from __future__ import annotations

import asyncio
import html
import importlib
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Collection
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import structlog

from qworker import logs
from qworker.app import Tasks
from qworker.backend import Backend
from qworker.cli.app_loader import import_tasks, load_app
from qworker.cli.options import URLCommand, backend_from_url, listen_options
from qworker.cli.output import echo
from qworker.errors import MissingExtra, UsageError
from qworker.kit.gc_freeze import freeze_loaded_modules
from qworker.kit.network import is_loopback
from qworker.supervisor.event_loop import loop_factory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from qworker.server.app import MqApp
    from qworker.ui.app import Dashboard

__all__ = ["DEFAULT_PORT", "command", "import_ui", "mount_dashboard", "serve_ui"]

log = structlog.get_logger()
DEFAULT_PORT = 8081


@click.command("ui", cls=URLCommand)
@click.argument("url")
@listen_options(DEFAULT_PORT)
@click.option(
    "--allowed-host",
    metavar="NAME",
    multiple=True,
    help="Name in the browser's address bar, if it is not this machine's; repeatable.",
)
@click.option(
    "--root-path", metavar="PATH", default="", help="Path below which a proxy serves the pages, such as /queues."
)
@click.option("--unix", metavar="PATH", help="Listen on a Unix socket of yours alone, instead of --host and --port.")
@click.option("--open", "opens", is_flag=True, help="Open the link in a browser on this machine.")
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
    unix: str | None,
    opens: bool,
    app: str | None,
    read_only: bool,
) -> None:
    r"""Serve a dashboard of the queues.

    The command prints a link that logs you in. It works once, and for 5 minutes. QWORKER_UI_TOKEN is a token with which
    admins can log in too, and QWORKER_UI_VIEW_TOKEN one for viewers, who see secrets in arguments masked.

    \b
    Examples:
      qworker ui file://./spool
      qworker ui redis://queue-host/0 --port 8090 --app app:tasks --open
      qworker ui file:///var/spool/app --host 0.0.0.0 --allowed-host queues.example.org
    """
    import_ui("qworker ui")
    if unix is not None and opens:
        raise UsageError("--open needs a port: a browser cannot open a Unix socket")
    if unix is None and not is_loopback(host) and not allowed_host:
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
        place = _Place(host, port, unix, [name.lower() for name in allowed_host], root_path, opens)
        runner.run(_serve(url, place, tasks, read_only=read_only))


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


class _Place(msgspec.Struct, frozen=True):
    """Where the dashboard is served."""

    host: str
    port: int
    # The path of a Unix socket, instead of the host and the port.
    unix: str | None
    # Names that browsers use for this machine.
    names: list[str]
    root_path: str
    # Whether a browser is opened.
    opens: bool

    def bind(self) -> socket.socket:
        """Listen."""
        from qworker.asgi.server import bind, bind_unix

        return bind(self.host, self.port) if self.unix is None else bind_unix(self.unix)

    def address(self, listener: socket.socket) -> str:
        """Return the beginning of the URL in a browser."""
        if self.unix is not None:
            return f"http://localhost:{self.port}"
        name = self.names[0] if self.names else self.host
        return f"http://{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"


async def serve_ui(url: str, port: int, tasks: Tasks) -> None:
    """Serve the dashboard of an app's store to this machine until a signal, and print a link that logs in.

    Args:
        url: The URL of the backend.
        port: The port. 0: a free one.
        tasks: The app.

    Raises:
        BackendUnavailable: The port or the store cannot be used.
    """
    await _serve(url, _Place("127.0.0.1", port, None, [], "", opens=False), tasks, read_only=False)


async def _serve(url: str, place: _Place, tasks: Tasks | None, *, read_only: bool) -> None:
    from qworker.asgi.limits import limited_protocol
    from qworker.asgi.server import Server
    from qworker.ui.app import below

    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(backend_from_url(url))
        listener = stack.enter_context(closing(place.bind()))
        if place.unix is not None:
            stack.callback(os.unlink, place.unix)
            echo(f"Forward the socket to your machine: ssh -L {place.port}:{os.path.abspath(place.unix)} HOST")
        address = place.address(listener)
        opened = _Opened(backend, url, address, frozenset(place.names))
        dashboard = await stack.enter_async_context(opened.serving(tasks, read_only=read_only))
        log.info("ui_started", url=backend.describe(), address=f"{address}{place.root_path}/")
        link = opened.show_link(place.root_path)
        if place.opens:
            stack.callback(_open_browser(link).unlink, missing_ok=True)
        freeze_loaded_modules()
        await Server(below(dashboard, place.root_path), limited_protocol()).serve(sockets=[listener])


def _open_browser(link: str) -> Path:
    """Open a link in a browser, and return the file that leads there.

    Other users of this machine can read the arguments of a browser, but not the file.
    """
    folder = os.environ.get("XDG_RUNTIME_DIR")
    with tempfile.NamedTemporaryFile("w", prefix="qworker-ui-", suffix=".html", dir=folder, delete=False) as page:
        page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}">')
    path = Path(page.name)
    # A browser in a terminal returns only when it is closed.
    threading.Thread(target=webbrowser.open, args=(path.as_uri(),), name="qworker-ui-browser", daemon=True).start()
    return path


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

    def show_link(self, root_path: str) -> str:
        """Print a link that logs in, and return it."""
        link = f"{root_path}/login?t={self._login.new_link()}"
        self._print(link)
        return f"{self._address}{link}"

    def _print(self, link: str) -> None:
        echo("Open this link to log in. It works once, within 5 minutes:")
        echo(f"  {self._address}{link}")
