"""`qworker run`: the worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import click
import structlog

from qworker.app import Tasks
from qworker.cli.common import Command, duration_type, url_option
from qworker.cli.loader import load_app
from qworker.errors import UsageError
from qworker.health.address import parse_address
from qworker.names import check_queue
from qworker.registry import open_backend
from qworker.supervisor.control import inherited
from qworker.supervisor.settings import RunSettings
from qworker.url import BackendURL, working_directory

__all__ = ["command"]


def _worker_count(value: str) -> tuple[int, int]:
    """`4`, or `2:8`: the least and the most."""
    least, colon, most = value.partition(":")
    if least.isdecimal() and (most.isdecimal() if colon else True):
        low, high = int(least), int(most) if colon else int(least)
        if 1 <= low <= high:
            return low, high
    raise UsageError(f"--workers {value!r}: write 4, or 2:8 for between two and eight")


@click.command("run", cls=Command)
@click.argument("app")
@click.option(
    "-Q",
    "--queue",
    type=check_queue,
    metavar="QUEUE",
    multiple=True,
    help="Work on this queue only; may be given several times.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1),
    metavar="N",
    default=100,
    show_default=True,
    help="Messages at once, in each process.",
)
@click.option(
    "-w",
    "--workers",
    type=_worker_count,
    metavar="N|MIN:MAX",
    default="1",
    show_default=True,
    help="Worker processes; MIN:MAX lets their number follow the backlog.",
)
@click.option("--burst", is_flag=True, help="End when nothing is ready or leased. Messages due later do not hold it.")
@click.option(
    "--wait-for-backend",
    is_flag=True,
    help="Wait for a backend that cannot be reached at the start, instead of ending with status 3.",
)
@click.option("--reload", is_flag=True, help="Begin again when a Python file under the working directory changes.")
@click.option(
    "--shutdown-timeout",
    type=duration_type(),
    default="30s",
    show_default=True,
    help="How long running handlers get after the first signal; then they are cancelled and their messages released.",
)
@click.option(
    "--visibility-timeout",
    type=duration_type(least=0.5),
    default="30s",
    show_default=True,
    help="How long a lease lasts unless it is renewed, which happens while the handler runs: how soon a dead host's messages run elsewhere.",
)
@url_option
@click.option(
    "--max-messages",
    type=click.IntRange(1),
    metavar="N",
    help="Replace a process by a fresh one after so many messages.",
)
@click.option(
    "--max-memory",
    type=click.FloatRange(1),
    metavar="MB",
    help="Replace a process by a fresh one above so much resident memory.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "console", "json"]),
    default="auto",
    show_default=True,
    help="auto: for people on a terminal, JSON elsewhere. To standard error.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="debug shows every message.",
)
@click.option(
    "--loop",
    type=click.Choice(["auto", "asyncio", "uvloop"]),
    default="auto",
    show_default=True,
    help="The event loop; auto takes uvloop where it is installed.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Answer /livez, /readyz, /metrics and /stats there, one port for all processes; QWORKER_HTTP_TOKEN guards the last two.",
)
@click.option(
    "--stall-timeout",
    type=duration_type(least=0.5),
    default="1m",
    show_default=True,
    help="How long the event loop may stand still before /livez says so.",
)
def command(
    app: str,
    queue: tuple[str, ...],
    concurrency: int,
    workers: tuple[int, int],
    burst: bool,
    wait_for_backend: bool,
    reload: bool,
    shutdown_timeout: float,
    visibility_timeout: float,
    url: str | None,
    max_messages: int | None,
    max_memory: float | None,
    log_format: Literal["auto", "console", "json"],
    log_level: str,
    loop: Literal["auto", "asyncio", "uvloop"],
    health: str | None,
    stall_timeout: float,
) -> int:
    r"""Run the tasks of APP: MODULE:ATTRIBUTE, where the module is imported from the working directory.

    Works on every queue that the app's tasks and handlers name, and makes those that do not exist yet.

    \b
    Signals:
      SIGTERM, SIGINT   lease nothing more, finish what runs, end; a second one cancels the handlers and
                        gives their messages back with their tries unchanged
      SIGTSTP           lease nothing more, and stay
      SIGUSR1           print what each consumer is doing

    \b
    Exit status: 0 clean, 1 crash, 2 usage or import error, 3 the backend cannot be reached at the start,
    4 handlers were still running at the end of --shutdown-timeout.

    \b
    Examples:
      qworker run app:tasks
      qworker run app:tasks -Q thumbs -Q mail -c 20 -w 4
      qworker run app:tasks --burst --log-format console
      qworker run app:tasks -w 4 --health 0.0.0.0:9090
      QWORKER_CONCURRENCY=20 qworker run app:tasks --reload
    """
    settings = RunSettings(
        queues=queue or None,
        concurrency=concurrency,
        workers=workers,
        burst=burst,
        wait_for_backend=wait_for_backend,
        reload=reload,
        shutdown_timeout=shutdown_timeout,
        visibility=visibility_timeout,
        max_messages=max_messages,
        max_memory_mb=max_memory,
        log_format=log_format,
        log_level=log_level,
        loop=loop,
        health=None if health is None else parse_address(health),
        stall_timeout=stall_timeout,
    )
    if burst and reload:
        raise UsageError("--burst ends and --reload does not: leave one of them out")
    if reload:
        # What is to be watched must be there.
        working_directory()
    control = inherited()
    if control is None and (workers != (1, 1) or os.getpid() == 1):
        # As a container's first process one worker has a supervisor too: somebody must reap strangers' zombies.
        from qworker.supervisor.supervisor import Supervisor

        return int(Supervisor(settings).run())
    from qworker.supervisor.single import run_single

    return int(run_single(lambda: _loaded(app, url), settings, control))


def _loaded(app: str, url: str | None) -> Tasks:
    """The app; warns where its store would be a new directory, while one of the same name lies beside the app."""
    tasks = load_app(app, url)
    parsed = BackendURL.parse(tasks.url)
    missing = open_backend(tasks.url).missing if parsed.is_relative else None
    module = getattr(sys.modules[app.partition(":")[0]], "__file__", None)
    if missing is not None and module is not None:
        folder = Path(module).parent
        beside = BackendURL.parse(parsed.anchored(folder)).directory
        if beside.is_dir():
            structlog.get_logger().warning(
                "store_is_new", directory=missing, beside_the_app=str(beside), hint=f"run qworker in {folder}"
            )
    return tasks
