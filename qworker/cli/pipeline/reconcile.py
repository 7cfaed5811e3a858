"""`qworker pipeline reconcile`: compare a table with a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qworker.cli.options import Command, check_store, duration_type, json_option
from qworker.cli.output import echo, print_json, print_table
from qworker.cli.pipeline.session import read_source, session, source_format, spark_options
from qworker.errors import UsageError
from qworker.names import check_existing_queue
from qworker.pipeline.spark.paths import absolute_url

if TYPE_CHECKING:
    from qworker.pipeline.jobs.reconcile import ReconcileResult

__all__ = ["command"]


@click.command("reconcile", cls=Command)
@click.argument("table")
@click.argument("queue", type=check_existing_queue)
@click.option(
    "--on",
    multiple=True,
    required=True,
    metavar="COLUMN=WHERE",
    help="Column of TABLE and the value of a message that are equal, such as path=kwargs.path or sku=args[0]; "
    "repeatable.",
)
@click.option("--url", metavar="URL", help="Backend URL of the queue, to read it as it is now.")
@click.option("--archive", metavar="PATH", help="Archive that `qworker pipeline archive` wrote.")
@click.option(
    "--format",
    "form",
    metavar="FORMAT",
    help="Format of TABLE: parquet, csv, json, orc or table. Default: by the ending of its name.",
)
@click.option(
    "--grace-period",
    type=duration_type(),
    default="1m",
    show_default=True,
    help="Messages that changed in this time are not reported as lost.",
)
@click.option("--output", metavar="PATH", help="Write each key with its verdict to this Parquet path.")
@spark_options
@json_option
def command(
    table: str,
    queue: str,
    on: tuple[str, ...],
    url: str | None,
    archive: str | None,
    form: str | None,
    grace_period: float,
    output: str | None,
    master: str | None,
    conf: tuple[str, ...],
    json: bool,
) -> int:
    r"""Find rows that were never enqueued, enqueued twice, or lost.

    TABLE is a Parquet, CSV or JSON file, a folder of them, or a table that Spark knows. Needs --url, --archive, or
    both: an archive has messages that the queue no longer keeps. Exit status 1: a row is missing, doubled or lost.

    \b
    Examples:
      qworker pipeline reconcile rows.parquet files --on path --archive ./archive --url file://./spool
      qworker pipeline reconcile orders.csv orders --on order_id=args[0] --archive ./archive --output verdicts
    """
    if url is None and archive is None:
        raise UsageError("nothing to compare with: pass --url, --archive, or both")
    place = None if url is None else absolute_url(url)
    if place is not None:
        check_store(place)
    kind = source_format(table, form)
    with session("reconcile", master, conf) as work:
        from qworker.pipeline.jobs.match_keys import parse_match
        from qworker.pipeline.jobs.reconcile import reconcile

        source = read_source(work.spark, table, kind)
        matches = [parse_match(one) for one in on]
        result = reconcile(
            work.spark, source, queue, on=matches, url=place, archive=archive, grace_period=grace_period, output=output
        )
    if json:
        print_json(result)
    else:
        _show(result)
    return 0 if result.agrees else 1


def _show(result: ReconcileResult) -> None:
    if result.shown:
        rows = [(r.verdict, f"{r.rows:,}", f"{r.messages:,}", r.key, " ".join(r.ids)) for r in result.shown]
        print_table(("verdict", "rows", "messages", "key", "ids"), rows)
        echo("")
    echo(
        f"{result.queue}: {result.keys:,} keys: {result.done:,} done, {result.open:,} open, {result.failed:,} failed, "
        f"{result.lost:,} lost, {result.never_enqueued:,} never enqueued; {result.enqueued_twice:,} enqueued twice"
    )
    for count, what in (
        (result.unknown, "keys of messages that are not in the table"),
        (result.rows_twice, "rows whose key another row has"),
        (result.rows_without_key, "rows without a key"),
        (result.lost_without_key, "lost messages of which nothing is left to take a key from"),
        (
            result.messages_without_key - result.lost_without_key,
            "other messages without a key: what is done is known by its arguments only where it was kept and archived",
        ),
    ):
        if count:
            echo(f"{count:,} {what}")
