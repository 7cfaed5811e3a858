"""`qworker pipeline replay`: run the failed or archived messages again that a predicate selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qworker.cli.options import URLCommand, check_store, json_option
from qworker.cli.output import echo, print_json, print_table
from qworker.cli.pipeline.session import session, spark_options
from qworker.names import check_existing_queue
from qworker.pipeline.spark.paths import absolute_url

if TYPE_CHECKING:
    from qworker.pipeline.jobs.replay import ReplayResult

__all__ = ["command"]


@click.command("replay", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.option("--where", required=True, metavar="SQL", help="Predicate over the columns of a message.")
@click.option(
    "--archive",
    metavar="PATH",
    help="Select from the messages of this archive, instead of the failed ones of the queue.",
)
@click.option(
    "--state",
    type=click.Choice(["failed", "done"]),
    default="failed",
    show_default=True,
    help="State of the archived messages to select.",
)
@click.option(
    "--name", metavar="NAME", help="Name of a replay from an archive. Each message is replayed once under a name."
)
@click.option("--dry-run", is_flag=True, help="Show what would happen, and change nothing.")
@spark_options
@json_option
def command(
    url: str,
    queue: str,
    where: str,
    archive: str | None,
    state: str,
    name: str | None,
    dry_run: bool,
    master: str | None,
    conf: tuple[str, ...],
    json: bool,
) -> None:
    r"""Run failed messages again that an SQL predicate selects.

    Messages that are still failed are requeued with tries 0. With --archive, messages that only the archive has are
    enqueued again. Archived messages that are ready, delayed, leased, or were acked since, are skipped. If a replay was
    killed, run it again: nothing is enqueued twice.

    \b
    Examples:
      qworker pipeline replay file://./spool thumbs --where "error like '%Timeout%'" --dry-run
      qworker pipeline replay file://./spool thumbs --where "get_json_object(kwargs, '$.width') > 640"
      qworker pipeline replay file://./spool thumbs --archive ./archive --where "finished_at > '2026-11-22'"
    """
    check_store(url)
    with session("replay", master, conf) as work:
        from qworker.pipeline.jobs.replay import replay

        result = replay(
            work.spark, absolute_url(url), queue, where, archive=archive, state=state, name=name, dry_run=dry_run
        )
    if json:
        print_json(result)
    else:
        _show(result)


def _show(result: ReplayResult) -> None:
    if result.chosen:
        rows = [(one.act, one.task or "-", f"{one.messages:,}", one.error or "-") for one in result.chosen]
        print_table(("what", "task", "messages", "error"), rows, texts=("error",))
        echo("")
    verb = "would requeue" if result.dry_run else "requeued"
    other = "would enqueue" if result.dry_run else "enqueued"
    echo(
        f"{result.queue}: {result.matched:,} chosen, {verb} {result.requeued:,}, {other} {result.enqueued:,}, "
        f"left alone {result.skipped:,}"
    )
    if result.name is not None and not result.dry_run:
        echo(f"the replay's name is {result.name}: under this name none of them is replayed again")
