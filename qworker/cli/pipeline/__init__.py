"""`qworker pipeline`: commands that run on Spark. The module of each command is imported when it is used."""

from __future__ import annotations

import click

from qworker.cli.options import Group

__all__ = ["JOBS", "command"]

# The commands are in the order in which messages meet them.
JOBS = {
    "load": "qworker.cli.pipeline.load:command",
    "archive": "qworker.cli.pipeline.archive:command",
    "report": "qworker.cli.pipeline.report:command",
    "replay": "qworker.cli.pipeline.replay:command",
    "dedupe": "qworker.cli.pipeline.dedupe:command",
    "reconcile": "qworker.cli.pipeline.reconcile:command",
}


@click.group("pipeline", cls=Group, places=JOBS)
def command() -> None:
    r"""Move and study messages in bulk, with Spark.

    Needs the extra spark and Java 17 or newer. Runs on all processors of this machine, or on the cluster of --master.
    The workers of a cluster must reach the queue, through a shared file system or Redis.

    \b
    Examples:
      qworker pipeline load file://./spool rows.parquet --app app:tasks --task index
      qworker pipeline archive file://./spool ./archive --delete
      qworker pipeline report ./archive --html report.html
    """
