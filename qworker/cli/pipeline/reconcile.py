"""`qworker pipeline reconcile`: a table and a queue, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qworker.cli.common import Command, check_store, duration_type, json_option
from qworker.cli.output import print_json, print_table, say
from qworker.cli.pipeline.session import read_source, session, source_format, spark_options
from qworker.errors import UsageError
from qworker.names import check_queue
from qworker.pipeline.places import absolute_url

if TYPE_CHECKING:
    from qworker.pipeline.reconcile import ReconcileResult

__all__ = ["command"]


@click.command("reconcile", cls=Command)
@click.argument("table")
@click.argument("queue", type=check_queue)
@click.option(
    "--on", multiple=True, required=True, metavar="COLUMN=WHERE", help="Such as path=kwargs.path, sku=args[0], n=key."
)
@click.option("--url", help="The queue as it is now.")
@click.option("--archive", metavar="PATH", help="What `qworker pipeline archive` wrote.")
@click.option("--format", "form", help="parquet, csv, json, orc or table; by the ending.")
@click.option(
    "--grace-period",
    type=duration_type(),
    default="1m",
    show_default=True,
    help="What moved this recently is not lost.",
)
@click.option("--output", metavar="PATH", help="Write every key with its verdict, as Parquet.")
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
    r"""Say which rows of TABLE were never enqueued in QUEUE, enqueued twice, or lost.

    TABLE is a Parquet, CSV or JSON file, a folder of them, or a table that Spark knows. Needs --url, --archive, or both: an archive
    knows what the queue no longer keeps. The exit status is 1 when something is missing, doubled or lost.

    \b
    Examples:
      qworker pipeline reconcile rows.parquet files --on path --archive ./archive --url file://./spool
      qworker pipeline reconcile orders.csv orders --on order_id=args[0] --archive ./archive --output verdicts
    """
    if url is None and archive is None:
        raise UsageError("there is nothing to compare with: add --url, --archive or both")
    place = None if url is None else absolute_url(url)
    if place is not None:
        check_store(place)
    kind = source_format(table, form)
    with session("reconcile", master, conf) as work:
        from qworker.pipeline.keys import parse_match
        from qworker.pipeline.reconcile import reconcile

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
        say("")
    say(
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
            say(f"{count:,} {what}")
