"""`qworker`: the table of commands. Errors become one line and an exit status here.

Exit status: 0 clean, 1 crash, 2 usage or import error, 3 the backend cannot be reached, 4 the drain timed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import ClassVar

import click

from qworker import __version__
from qworker.cli.options import Group, load_command
from qworker.cli.output import print_error
from qworker.errors import (
    BackendUnavailable,
    FormatTooNew,
    PermissionDenied,
    QueueDamaged,
    QueueNotFound,
    QworkerError,
    StorageFull,
    StoreNotFound,
    UsageError,
)
from qworker.streams import ERROR_STREAM, flush_all, flush_output, is_of_output, prepare, silence_stdout

__all__ = ["COMMANDS", "cli", "main"]

EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

# The module of a command is imported when the command is used, so that commands start fast. `qworker --help` shows
# these groups, and one more for the commands of backends and other packages.
GROUPS: dict[str, dict[str, str]] = {
    "Run and enqueue": {
        "run": "qworker.cli.run:command",
        "enqueue": "qworker.cli.enqueue:command",
        "publish": "qworker.cli.publish:command",
        "scan": "qworker.cli.scan:command",
        "demo": "qworker.cli.demo:command",
    },
    "Look": {
        "ls": "qworker.cli.ls:command",
        "stats": "qworker.cli.stats:command",
        "top": "qworker.cli.top:command",
        "browse": "qworker.cli.browse:command",
        "failures": "qworker.cli.failures:command",
        "explain": "qworker.cli.explain:command",
        "job": "qworker.cli.job:command",
        "history": "qworker.cli.history:command",
        "export": "qworker.cli.export:command",
        "schedules": "qworker.cli.schedules:command",
        "doctor": "qworker.cli.doctor:command",
        "bench": "qworker.cli.bench:command",
    },
    "Change": {
        "create": "qworker.cli.create:command",
        "pause": "qworker.cli.pause:pause_command",
        "resume": "qworker.cli.pause:resume_command",
        "requeue": "qworker.cli.requeue:command",
        "remove": "qworker.cli.remove:command",
        "purge": "qworker.cli.purge:command",
    },
    "Bulk and Spark": {
        "move": "qworker.cli.move:command",
        "pipeline": "qworker.cli.pipeline:command",
    },
    "Servers": {
        "serve": "qworker.cli.serve:command",
        "ui": "qworker.cli.ui:command",
        "health": "qworker.cli.health:command",
    },
}
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}


# Backends and other packages can register commands under this entry point.
GROUP = "qworker.commands"


class _Commands(Group):
    """The group of all commands, with their groups in the help."""

    synonyms: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("worker", "start", "work", "consume"), "did you mean run?"),
        **dict.fromkeys(("list", "queues"), "did you mean ls?"),
        **dict.fromkeys(("status", "info", "count"), "did you mean stats?"),
        "inspect": "did you mean browse (the messages) or top (the queues, live)?",
        **dict.fromkeys(("show", "peek"), "did you mean browse, or explain for one message?"),
        **dict.fromkeys(("flush", "clear", "empty"), "did you mean purge?"),
        **dict.fromkeys(("delete", "rm"), "did you mean remove (some messages) or purge (all in a state)?"),
        **dict.fromkeys(("errors", "failed", "dead"), "did you mean failures?"),
        "retry": "did you mean requeue?",
        **dict.fromkeys(("send", "call", "submit", "push-task", "apply"), "did you mean enqueue?"),
        **dict.fromkeys(("stop", "quiet"), "did you mean pause, for a queue? A worker is stopped by SIGTERM"),
        "down": "did you mean pause?",
        **dict.fromkeys(("up", "unpause"), "did you mean resume?"),
        **dict.fromkeys(("install", "make", "init"), "did you mean create?"),
        **dict.fromkeys(("events", "log", "logs"), "did you mean history?"),
        **dict.fromkeys(("check", "ping"), "did you mean doctor?"),
        **dict.fromkeys(("scheduler", "schedule", "cron"), "did you mean schedules?"),
        "beat": "qworker has no process for schedules: every worker enqueues their calls. Did you mean schedules?",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *sorted(entry_points(group=GROUP).names - COMMANDS.keys())]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        width = max(map(len, names))
        for title, group in {**GROUPS, "Protocols": [name for name in names if name not in COMMANDS]}.items():
            found = [(name, self.get_command(ctx, name)) for name in group]
            limit = formatter.width - width - 6
            rows = [(name.ljust(width), one.get_short_help_str(limit)) for name, one in found if one is not None]
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = COMMANDS.get(cmd_name)
        if place is None:
            place = next((point.value for point in entry_points(group=GROUP, name=cmd_name)), None)
        return None if place is None else load_command(place, cmd_name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="qworker")
def cli() -> None:
    r"""Run background tasks from a queue in a directory or in Redis.

    \b
    First steps:
      qworker demo                                   see that a killed worker loses no message
      qworker run app:tasks                          run the tasks of app.py
      qworker enqueue app:tasks thumbnail '"a.png"'  enqueue one call
      qworker stats file://./spool                   count the messages in the queues

    You can also set an option as QWORKER_<OPTION> (QWORKER_CONCURRENCY=20), or in the table [tool.qworker] of
    pyproject.toml (concurrency = 20). The command line has precedence over the environment, and the environment over
    the file. If no URL is given, QWORKER_URL is used.

    Exit status: 0 clean, 1 crash, 2 usage or import error, 3 the backend cannot be reached, 4 the drain timed out.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    prepare()
    try:
        return _run(arguments)
    finally:
        flush_all()


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result: object = cli.main(
            args=None if arguments is None else list(arguments), prog_name="qworker", standalone_mode=False
        )
        flush_output()
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show(ERROR_STREAM)
        return EXIT_USAGE
    except QworkerError as error:
        print_error(error)
        return exit_status(error)
    except BrokenPipeError:
        silence_stdout()
        return 0
    except OSError as error:
        if not is_of_output(error):
            raise
        silence_stdout()
        print_error(f"cannot write to standard output: {error.strerror}")
        return EXIT_CRASH
    return result if isinstance(result, int) else 0


def exit_status(error: QworkerError) -> int:
    """Return the exit status for an error."""
    if isinstance(error, StoreNotFound):
        return EXIT_CRASH
    if isinstance(error, UsageError | QueueNotFound):
        return EXIT_USAGE
    if isinstance(error, BackendUnavailable | PermissionDenied | StorageFull | FormatTooNew | QueueDamaged):
        return EXIT_UNREACHABLE
    return EXIT_CRASH
