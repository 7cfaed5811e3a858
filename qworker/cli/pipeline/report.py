"""`qworker pipeline report`: report the history of queues in numbers."""

from __future__ import annotations

import importlib.util
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qworker.cli.options import Command, json_option
from qworker.cli.output import echo, print_json, print_table
from qworker.cli.pipeline.session import session, spark_options
from qworker.duration import parse_duration
from qworker.errors import MissingExtra, UsageError
from qworker.names import check_existing_queue
from qworker.pipeline.spark.paths import absolute_url

if TYPE_CHECKING:
    from qworker.pipeline.report import Report

__all__ = ["command", "parse_time"]


@click.command("report", cls=Command)
@click.argument("source")
@click.argument("queues", type=check_existing_queue, nargs=-1, metavar="[QUEUE]...")
@click.option(
    "--since", metavar="TIME", help="Start of the period: an age such as 24h, or a time such as 2026-11-23T08:00 (UTC)."
)
@click.option("--until", metavar="TIME", help="End of the period: an age, or a time in UTC.")
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
    since: str | None,
    until: str | None,
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
    begin, end = parse_time(since), parse_time(until)
    if html is not None and importlib.util.find_spec("jinja2") is None:
        raise MissingExtra("spark", "qworker pipeline report --html")
    with session("report", master, conf) as work:
        from qworker.pipeline.inputs import is_queue_url
        from qworker.pipeline.report import page, report

        place = absolute_url(source) if is_queue_url(source) else source
        found = report(work.spark, place, queues=queues, since=begin, until=end)
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


def parse_time(words: str | None) -> float | None:
    """Return the Unix seconds of an age, or of a date with or without a time. Times without a zone are in UTC.

    Raises:
        UsageError: The text is neither.
    """
    if words is None:
        return None
    try:
        # Dates are first, because 20261123 is a date and not an age.
        found = datetime.fromisoformat(words.strip())
    except ValueError:
        try:
            return time.time() - parse_duration(words.strip())
        except UsageError as error:
            raise UsageError(f"{error}; or a time such as 2026-11-23T08:00") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
