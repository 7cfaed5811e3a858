"""`qworker pipeline archive`: write finished messages and the history to Parquet."""

from __future__ import annotations

import click

from qworker.cli.options import URLCommand, check_store, json_option
from qworker.cli.output import echo, print_json
from qworker.cli.pipeline.session import session, spark_options
from qworker.names import check_existing_queue, counted
from qworker.pipeline.spark.paths import absolute_url

__all__ = ["command"]


@click.command("archive", cls=URLCommand)
@click.argument("url")
@click.argument("target")
@click.argument("queues", type=check_existing_queue, nargs=-1, metavar="[QUEUE]...")
@click.option("--state", type=click.Choice(["done", "failed"]), help="Archive only messages in this state.")
@click.option("--history/--no-history", default=True, help="Archive the history of all queues too (the default).")
@click.option("--delete", is_flag=True, help="Remove archived messages from the queue afterwards.")
@click.option("--compact/--no-compact", default=True, help="Compact small files (the default).")
@spark_options
@json_option
def command(
    url: str,
    target: str,
    queues: tuple[str, ...],
    state: str | None,
    history: bool,
    delete: bool,
    compact: bool,
    master: str | None,
    conf: tuple[str, ...],
    json: bool,
) -> None:
    r"""Write finished messages and the history to Parquet tables.

    Brings the tables in TARGET up to date with the finished messages of each QUEUE, or of all queues, and with their
    history. Each run adds what is new, by queue and day. If a run was killed, run it again: nothing is in the tables
    twice. --delete removes only what is durable in the tables.

    \b
    Examples:
      qworker pipeline archive file://./spool ./archive
      qworker pipeline archive redis://localhost/0 s3a://bucket/archive thumbs --delete
    """
    check_store(url)
    with session("archive", master, conf) as work:
        from qworker.pipeline.jobs.archive import archive

        states = ("done", "failed") if state is None else (state,)
        result = archive(
            work.spark,
            absolute_url(url),
            target,
            queues=queues or None,
            states=states,
            history=history,
            delete=delete,
            compact=compact,
            say=work.say,
        )
    if json:
        print_json(result)
        return
    echo(
        f"{result.target}: added {counted(result.messages, 'message')} and {counted(result.events, 'event')}"
        f" in {counted(result.files, 'file')}"
    )
    if delete:
        echo(f"removed {counted(result.removed, 'message')} from the queue")
    if result.recovered:
        echo("an interrupted earlier run was finished first")
