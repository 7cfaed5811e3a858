"""`qworker pipeline dedupe`: find and remove messages that ask for the same work."""

from __future__ import annotations

import click

from qworker.cli.options import URLCommand, check_store, json_option
from qworker.cli.output import echo, print_json, print_table
from qworker.cli.pipeline.session import session, spark_options
from qworker.names import check_existing_queue, counted
from qworker.pipeline.spark.paths import absolute_url

__all__ = ["command"]


@click.command("dedupe", cls=URLCommand)
@click.argument("url")
@click.argument("queue", type=check_existing_queue)
@click.option(
    "--on",
    multiple=True,
    metavar="WHERE",
    help="Value that two duplicates share: args[0], kwargs.path, key, ...; repeatable. Default: the call.",
)
@click.option("--include-done", is_flag=True, help="Count messages that are done and still kept as well.")
@click.option("--archive", metavar="PATH", help="Count messages that this archive has as done as well.")
@click.option("--delete", is_flag=True, help="Remove the duplicates. Without this option, they are only reported.")
@spark_options
@json_option
def command(
    url: str,
    queue: str,
    on: tuple[str, ...],
    include_done: bool,
    archive: str | None,
    delete: bool,
    master: str | None,
    conf: tuple[str, ...],
    json: bool,
) -> None:
    r"""Find and remove messages that ask for the same work.

    The oldest message stays, and leased messages are never removed. Without --on, two messages are the same if they
    call the same task with the same arguments, or have the same body.

    \b
    Examples:
      qworker pipeline dedupe file://./spool thumbs
      qworker pipeline dedupe file://./spool thumbs --on kwargs.path --delete
    """
    check_store(url)
    with session("dedupe", master, conf) as work:
        from qworker.pipeline.jobs.dedupe import dedupe
        from qworker.pipeline.jobs.match_keys import KeyMatch

        matches = [KeyMatch("", one) for one in on]
        result = dedupe(
            work.spark, absolute_url(url), queue, on=matches, include_done=include_done, archive=archive, delete=delete
        )
    if json:
        print_json(result)
        return
    if result.groups:
        print_table(("surplus", "kept", "key"), [(f"{g.surplus:,}", g.kept or "(done)", g.key) for g in result.groups])
        echo("")
    text = f"{queue}: {counted(result.surplus, 'message')} too many, of {counted(result.keys, 'key')}"
    echo(
        f"{text}; removed {result.removed:,}"
        if delete
        else f"{text}; add --delete to remove them"
        if result.surplus
        else text
    )
