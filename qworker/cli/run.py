"""`qworker run`: run a worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import click
import structlog

from qworker.app import Tasks
from qworker.backend.registry import open_backend
from qworker.cli.app_loader import import_tasks, load_app
from qworker.cli.options import Command, duration_type, url_option
from qworker.errors import UsageError
from qworker.health.address import parse_address
from qworker.kit.directory.missing import is_missing
from qworker.queue_share import QueueShare, check_shares, parse_queue_share
from qworker.supervisor.control_socket import control_client_from_env
from qworker.supervisor.reexec import command_start
from qworker.supervisor.run_settings import RunSettings
from qworker.url import BackendURL, working_directory

__all__ = ["command"]


def _worker_count(value: str) -> tuple[int, int]:
    """Return the minimum and the maximum of `4` or `2:8`."""
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
    type=parse_queue_share,
    metavar="QUEUE[:WEIGHT][=N]",
    multiple=True,
    help="Lease from this queue only; repeatable. Queues get shares of each lease by their WEIGHT (1). N is the "
    "maximum number of messages of this queue at once, in each process. Write a queue whose name ends in :5 as "
    "NAME:5:1.",
)
@click.option("--strict", is_flag=True, help="Lease from a queue only if those in front of it in -Q are empty.")
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1),
    metavar="N",
    default=100,
    show_default=True,
    help="Maximum number of messages at once, in each process.",
)
@click.option(
    "--isolated",
    type=click.IntRange(1),
    metavar="N",
    default=4,
    show_default=True,
    help="Maximum number of child processes for messages whose last attempt killed its process, in each process.",
)
@click.option(
    "-w",
    "--workers",
    type=_worker_count,
    metavar="N|MIN:MAX",
    default="1",
    show_default=True,
    help="Number of worker processes. MIN:MAX scales it with the backlog.",
)
@click.option(
    "--burst", is_flag=True, help="Exit when no message is ready or leased. Does not wait for delayed messages."
)
@click.option(
    "--wait-for-backend",
    is_flag=True,
    help="Wait if the backend cannot be reached at the start, instead of exiting with status 3.",
)
@click.option(
    "--no-schedules",
    is_flag=True,
    help="Do not enqueue the calls of schedules in this worker. Their messages still run here.",
)
@click.option(
    "--reload", is_flag=True, help="Restart the worker when a Python file under the working directory changes."
)
@click.option(
    "--shutdown-timeout",
    type=duration_type(),
    default="30s",
    show_default=True,
    help="Time that running handlers have after the first signal. Then they are cancelled and their messages "
    "are released.",
)
@click.option(
    "--visibility-timeout",
    type=duration_type(least=0.5),
    default="30s",
    show_default=True,
    help="Lease length. The worker extends it while the handler runs. If the host dies, its messages run "
    "elsewhere after this time.",
)
@url_option
@click.option(
    "--max-messages",
    type=click.IntRange(1),
    metavar="N",
    help="Replace a worker process after this number of messages.",
)
@click.option(
    "--max-memory",
    type=click.FloatRange(1),
    metavar="MB",
    help="Replace a worker process when its resident memory is larger than this.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "console", "json"]),
    default="auto",
    show_default=True,
    help="Log format on standard error. auto: console on a terminal, json otherwise.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Lowest log level to show. debug shows every message.",
)
@click.option(
    "--loop",
    type=click.Choice(["auto", "asyncio", "uvloop"]),
    default="auto",
    show_default=True,
    help="Event loop. auto: uvloop if it is installed.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /livez, /readyz, /metrics and /stats on this address, one port for all processes. "
    "QWORKER_HTTP_TOKEN protects the last two.",
)
@click.option(
    "--stall-timeout",
    type=duration_type(least=0.5),
    default="1m",
    show_default=True,
    help="Time that the event loop may be blocked before /livez reports it.",
)
def command(
    app: str,
    queue: tuple[QueueShare, ...],
    strict: bool,
    concurrency: int,
    isolated: int,
    workers: tuple[int, int],
    burst: bool,
    wait_for_backend: bool,
    no_schedules: bool,
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
    r"""Run the tasks of an app.

    APP is MODULE:ATTRIBUTE. The module is imported from the working directory. The worker leases from every queue that
    the tasks and raw handlers of the app name, and creates those that do not exist.

    \b
    Signals:
      SIGTERM, SIGINT   lease nothing more, let running handlers finish, and exit. A second signal cancels
                        the handlers and releases their messages with their tries unchanged.
      SIGTSTP           lease nothing more, and stay
      SIGUSR1           print what each consumer is doing

    \b
    Exit status:
      0  clean
      1  crash
      2  usage or import error
      3  the backend cannot be reached or used at the start
      4  handlers were still running at the end of --shutdown-timeout

    \b
    Examples:
      qworker run app:tasks
      qworker run app:tasks -Q thumbs -Q mail -c 20 -w 4
      qworker run app:tasks -Q high:6 -Q low:1 -Q hooks=5
      qworker run app:tasks -Q high -Q low --strict
      qworker run app:tasks --burst --log-format console
      qworker run app:tasks -w 4 --health 0.0.0.0:9090
      QWORKER_CONCURRENCY=20 qworker run app:tasks --reload
    """
    settings = RunSettings(
        queues=queue or None,
        strict=strict,
        concurrency=concurrency,
        isolated=isolated,
        workers=workers,
        burst=burst,
        wait_for_backend=wait_for_backend,
        schedules=not no_schedules,
        started=command_start(),
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
    check_shares(settings.queues, strict=strict)
    if burst and reload:
        raise UsageError("--burst and --reload cannot be combined")
    if reload:
        # The working directory must exist, because it is watched.
        working_directory()
    control = control_client_from_env()
    if control is None and (workers != (1, 1) or os.getpid() == 1):
        # As process 1 of a container, one worker has a supervisor too, which must reap orphaned processes.
        from qworker.supervisor.supervisor import Supervisor

        return int(Supervisor(settings).run())
    from qworker.supervisor.worker_main import run_single

    return int(run_single(lambda: _loaded(app, url), settings, control))


def _loaded(app: str, url: str | None) -> Tasks:
    """Return the app. Warn if its store is a new directory and the folder of the app has one with the same name."""
    tasks = load_app(app, url)
    import_tasks(tasks)
    parsed = BackendURL.parse(tasks.url)
    directory = open_backend(tasks.url).directory if parsed.is_relative else None
    module = getattr(sys.modules[app.partition(":")[0]], "__file__", None)
    if is_missing(directory) and module is not None:
        folder = Path(module).parent
        beside = BackendURL.parse(parsed.anchored(folder)).directory
        if beside.is_dir():
            structlog.get_logger().warning(
                "store_is_new", directory=str(directory), beside_the_app=str(beside), hint=f"run qworker in {folder}"
            )
    return tasks
