"""`qworker pipeline report`: report the history of queues in numbers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qworker.cli.options import Command, json_option, moment_type
from qworker.cli.output import echo, print_json, print_table
from qworker.cli.pipeline.session import session, spark_options
from qworker.errors import MissingExtra, UsageError
from qworker.names import check_existing_queue
from qworker.pipeline.spark.paths import absolute_url

if TYPE_CHECKING:
    from qworker.pipeline.report import Report

__all__ = ["command"]


@click.command("report", cls=Command)
@click.argument("source")
@click.argument("queues", type=check_existing_queue, nargs=-1, metavar="[QUEUE]...")
@click.option(
    "--since",
    type=moment_type,
    metavar="TIME",
    help="Start of the period: an age such as 24h, or a time such as 2026-11-23T08:00 (UTC).",
)
@click.option("--until", type=moment_type, metavar="TIME", help="End of the period: an age, or a time in UTC.")
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write an HTML page with plots to this file too.",
)
@spark_options
@json_option
def command(
    source: str,
    queues: tuple[str, ...],
    since: float | None,
    until: float | None,
    html: Path | None,
    master: str | None,
    conf: tuple[str, ...],
    json: bool,
) -> None:
    r"""Report throughput, waits, run times, retries, failures and depths.

    SOURCE is an archive of `qworker pipeline archive`, or the URL of queues. Queues are read as they are now, with the
    events that their history still keeps. Without a QUEUE, all queues are reported.

    \b
    Examples:
      qworker pipeline report ./archive --since 24h --html report.html
      qworker pipeline report file://./spool thumbs --json
    """
    if html is not None and importlib.util.find_spec("jinja2") is None:
        raise MissingExtra("spark", "qworker pipeline report --html")
    with session("report", master, conf) as work:
        from qworker.pipeline.inputs import is_queue_url
        from qworker.pipeline.report import page, report

        place = absolute_url(source) if is_queue_url(source) else source
        found = report(work.spark, place, queues=queues, since=since, until=until)
    if html is not None:
        _write(html, page(found))
    if json:
        print_json(found)
    else:
        _show(found, html)


def _write(path: Path, text: str) -> None:
    """Write the page atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _show(found: Report, html: Path | None) -> None:
    from qworker.pipeline.report.format import failure_rows, format_time, queue_rows, task_rows, worker_rows

    echo(f"{found.source}, {format_time(found.since)} to {format_time(found.until)}")
    for headings, rows in (queue_rows(found), task_rows(found), failure_rows(found), worker_rows(found)):
        if rows:
            echo("")
            print_table(headings, rows)
    if html is not None:
        echo("")
        echo(f"written: {html}")
