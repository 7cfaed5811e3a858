"""`qworker pipeline`: what moves and studies messages in bulk, on Spark. Each job is one module, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click

from qworker.cli.common import unwrapped

__all__ = ["JOBS", "command"]

JOBS = {
    "load": "qworker.cli.pipeline.load:command",
    "archive": "qworker.cli.pipeline.archive:command",
    "report": "qworker.cli.pipeline.report:command",
    "replay": "qworker.cli.pipeline.replay:command",
    "dedupe": "qworker.cli.pipeline.dedupe:command",
    "reconcile": "qworker.cli.pipeline.reconcile:command",
}


class _Jobs(click.Group):
    """The jobs, in the order in which messages meet them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = unwrapped(self.help)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(JOBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = JOBS.get(cmd_name)
        if place is None:
            return None
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, click.Command):
            raise TypeError(f"{place} is no command")
        return found


@click.group("pipeline", cls=_Jobs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def command() -> None:
    r"""Move and study messages in bulk, with Spark.

    Needs the extra spark and a Java of at least 17. Runs on all processors of this machine, or where --master says; on a cluster its
    workers must reach the queue: a shared file system, or Redis.

    \b
    Examples:
      qworker pipeline load file://./spool rows.parquet --app app:tasks --task index
      qworker pipeline archive file://./spool ./archive --delete
      qworker pipeline report ./archive --html report.html
    """
