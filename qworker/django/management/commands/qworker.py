"""`manage.py qworker`: the command `qworker`, after Django is set up."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from qworker.cli.main import main
from qworker.django.site import set_up
from qworker.errors import UsageError
from qworker.worker.handlers.preparation import prepare_with

__all__ = ["Command"]


class Command(BaseCommand):
    """Imports the modules `tasks` of the installed apps, and runs `qworker` with the same arguments."""

    help = "Run the command qworker for the tasks of this site: manage.py qworker run shop.tasks:tasks"
    # `qworker run` would hold back an error of the site, which `manage.py check` reports.
    requires_system_checks: Sequence[str] = []

    def run_from_argv(self, argv: list[str]) -> None:
        """Run with the arguments of the command line. `--settings` and `--pythonpath` are Django's."""
        used = CommandParser(add_help=False, allow_abbrev=False)
        for option in ("--settings", "--pythonpath"):
            # manage.py has used them already.
            used.add_argument(option)
        # What follows `--` belongs to a program that `qworker scan` starts.
        end = argv.index("--") if "--" in argv else len(argv)
        raise SystemExit(_run([*used.parse_known_args(argv[2:end])[1], *argv[end:]]))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Print the help of `qworker`."""
        main(["--help"])

    def add_arguments(self, parser: CommandParser) -> None:
        """Take all arguments, for `call_command("qworker", "run", "shop.tasks:tasks", "--burst")`."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, arguments: Sequence[str], **options: Any) -> None:
        """Run with the arguments of `call_command`.

        Raises:
            CommandError: The exit status is not 0.
        """
        status = _run(arguments)
        if status:
            raise CommandError(f"qworker ended with the exit status {status}", returncode=status)


def _run(arguments: Sequence[str]) -> int:
    try:
        # A handler can then be found by its name, and an app's tasks are complete when a worker starts.
        set_up()
    except UsageError as error:
        raise SystemExit(f"qworker: {error}") from error
    # They are not started by manage.py, and import the same tasks.
    prepare_with(f"{set_up.__module__}:{set_up.__name__}")
    return main(arguments)
