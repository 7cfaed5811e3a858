"""`qworker pipeline load`: enqueue a call for each row of a table."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qworker.cli.app_loader import load_app
from qworker.cli.options import URLCommand, json_option
from qworker.cli.output import echo, print_json, reporting
from qworker.cli.pipeline.session import read_source, session, source_format, spark_options
from qworker.errors import UsageError
from qworker.names import check_existing_queue, counted
from qworker.pipeline.spark.paths import absolute_url
from qworker.url import mask, working_directory

if TYPE_CHECKING:
    from qworker.pipeline.jobs.load import LoadResult

__all__ = ["command", "file_fingerprint"]


@click.command("load", cls=URLCommand)
@click.argument("url")
@click.argument("table")
@click.option("--task", required=True, metavar="NAME", help="Task that each row calls.")
@click.option(
    "--app",
    metavar="MODULE:ATTRIBUTE",
    help="App that has the task. Rows are checked against the annotations of the task.",
)
@click.option(
    "--queue",
    type=check_existing_queue,
    metavar="QUEUE",
    help="Queue to enqueue in. Default: the queue of the task, if --app is given.",
)
@click.option(
    "--arg",
    multiple=True,
    metavar="NAME=SQL",
    help="Argument of the call, from a column or an SQL expression; repeatable. Default: the columns with the "
    "names of the arguments.",
)
@click.option("--due-at", metavar="SQL", help="Time from which the call can run: a timestamp, or Unix seconds.")
@click.option("--priority", metavar="SQL", help="Priority from 0 (default) to 9 (first).")
@click.option("--unique-key", metavar="SQL", help="Store no call while one with this key is ready, delayed or leased.")
@click.option(
    "--name",
    metavar="NAME",
    help="Name of the load. A load with the same name enqueues nothing twice. Default: made from the table and "
    "the other arguments.",
)
@click.option(
    "--rejects",
    metavar="PATH",
    help="Write rejected rows and their reasons to this Parquet path. Without it, the first rejected row fails "
    "the load.",
)
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    help="Format of TABLE: parquet, csv, json, orc or table. Default: by the ending of its name.",
)
@click.option(
    "--staging-dir",
    metavar="PATH",
    help="Folder that all machines see, for backends that cannot store staged messages.",
)
@spark_options
@json_option
def command(
    url: str,
    table: str,
    task: str,
    app: str | None,
    queue: str | None,
    arg: tuple[str, ...],
    due_at: str | None,
    priority: str | None,
    unique_key: str | None,
    name: str | None,
    rejects: str | None,
    form: str | None,
    staging_dir: str | None,
    master: str | None,
    conf: tuple[str, ...],
    json: bool,
) -> None:
    r"""Enqueue one call of a task for each row of a table, exactly once.

    TABLE is a Parquet, CSV or JSON file, a folder of them, or a table that Spark knows. No message is visible before
    all of them are stored. If a load was killed, run it again with the same arguments: it enqueues the missing
    messages. A finished load enqueues nothing more. To load the same table again, give the load another --name.

    \b
    Examples:
      qworker pipeline load file://./spool pictures.parquet --app app:tasks --task thumbnail
      qworker pipeline load file://./spool orders.csv --task bill --queue bills --arg id --arg 'total=price * 1.2'
    """
    args = dict(parse_pair(one) for one in arg) or None
    tasks = None if app is None else load_app(app)
    name = name or _load_name(mask(absolute_url(url)), task, queue or "", *arg, *file_fingerprint(table))
    kind = source_format(table, form)
    # With an app, the texts of a CSV file are converted to the types of the task's annotations. Without an app, Spark
    # infers the type of each column.
    text = kind == "csv" and tasks is not None
    with session("load", master, conf) as work:
        from qworker.pipeline.jobs.load import load

        source = read_source(work.spark, table, kind, text=text)
        beside = {
            "due_at": due_at,
            "priority": priority,
            "unique_key": unique_key,
            "rejects": _whole(rejects),
            "staging_dir": _whole(staging_dir),
        }
        result = load(
            work.spark,
            source,
            absolute_url(url),
            queue,
            task,
            args,
            app=tasks,
            name=name,
            text=text,
            **beside,
        )
    with reporting("the calls are stored"):
        _report(result, task, json)


def _report(result: LoadResult, task: str, json: bool) -> None:
    if json:
        print_json(result)
        return
    what = f"{counted(result.enqueued, 'call')} of {task} in {result.queue} as the load {result.name}"
    if result.already_loaded:
        echo(f"enqueued nothing: an earlier run enqueued {what}. Use another --name to enqueue the table again.")
    else:
        echo(f"enqueued {what}")
    if result.rejected:
        echo(f"rejected {counted(result.rejected, 'row')}: see the column reason in {result.rejects}")


def parse_pair(words: str) -> tuple[str, str]:
    name, equals, expression = (part.strip() for part in words.partition("="))
    if not name or (equals and not expression):
        raise UsageError(f"--arg {words}: write NAME=COLUMN, such as path=file_name")
    return name, expression or f"`{name}`"


def _whole(path: str | None) -> str | None:
    """Return the absolute path of a folder, because Spark's workers have other working directories."""
    return path if path is None or "://" in path else os.path.normpath(os.path.join(working_directory(), path))


def file_fingerprint(table: str) -> list[str]:
    """Return the names, sizes and times of a table's local files, to detect that the table has changed."""
    path = Path(table)
    files = [path, *path.rglob("*")] if path.exists() else []
    stamps = [(str(file), file.stat()) for file in sorted(files) if file.is_file()]
    return [table, *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stamps)]


def _load_name(*parts: str) -> str:
    return f"load-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:12]}"
