"""The exit statuses of fsq, which `scan` and the commands of `fsq` share."""

from __future__ import annotations

from typing import Any

import click

from qworker.cli.options import Command
from qworker.cli.output import print_error
from qworker.errors import UsageError
from qworker.streams import ERROR_STREAM

__all__ = ["EXIT_TEMPORARY", "EXIT_USAGE", "FsqStatusCommand"]

EXIT_TEMPORARY, EXIT_USAGE = 111, 100


class FsqStatusCommand(Command):
    """A command that exits with status 100 on wrong usage."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Create the context. Wrong usage ends with status 100."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            error.show(ERROR_STREAM)
            raise click.exceptions.Exit(EXIT_USAGE) from error
        except UsageError as error:
            print_error(error)
            raise click.exceptions.Exit(EXIT_USAGE) from error
