"""The code that these commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec

from qworker.backend.scan_source import ScanError
from qworker.cli.fsq_statuses import EXIT_TEMPORARY, EXIT_USAGE, FsqStatusCommand
from qworker.cli.options import URLCommand
from qworker.cli.output import echo, print_error
from qworker.errors import InvalidURL, QworkerError, UsageError
from qworker.kit.opening import open_directory
from qworker.url import BackendURL
from qworker_fsq.environment import Constants
from qworker_fsq.options import FsqOptions, parse_root

__all__ = [
    "FsqCommand",
    "FsqRoot",
    "open_fsq_root",
    "owner_options",
    "print_if",
    "print_warning",
]

F = TypeVar("F", bound=Callable[..., Any])


class FsqCommand(FsqStatusCommand, URLCommand):
    """A command that takes an `fsq:` URL, and exits with fsq's statuses."""

    def invoke(self, ctx: click.Context) -> Any:
        """Print an error as one line, and exit with status 100 or 111."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            print_error(error)
            return EXIT_USAGE
        except (QworkerError, ScanError) as error:
            print_error(error)
        except OSError as error:
            name = "" if error.filename is None else f"{error.filename}: "
            print_error(f"{name}{error.strerror}")
        return EXIT_TEMPORARY


class FsqRoot(msgspec.Struct, frozen=True):
    """A root directory and the names in it.

    Attributes:
        directory: The path of the root.
        constants: The standard's constants.
        fd: A descriptor of the root.
    """

    directory: str
    constants: Constants
    fd: int


def print_if(verbose: bool) -> Callable[[str], None]:
    """Return a function that prints a line if `verbose`."""
    return print_warning if verbose else lambda _text: None


def print_warning(text: str) -> None:
    """Print a line on standard error."""
    echo(text, err=True)


@contextmanager
def open_fsq_root(url: str, **constants: str | None) -> Generator[FsqRoot]:
    """Open the root of an `fsq:` URL.

    Args:
        url: The URL.
        constants: Values that replace those of the environment, except for None.

    Raises:
        InvalidURL: It is not an `fsq:` URL.
        OSError: The directory does not exist.
    """
    parsed = BackendURL.parse(url)
    if parsed.scheme != "fsq":
        raise InvalidURL(f"{parsed.masked}: this is for queues of fsq: write fsq:///var/fsq")
    given = {name: value for name, value in constants.items() if value is not None}
    known = FsqOptions.from_url(parsed).constants.changed(**given)
    directory = str(parse_root(parsed, known))
    fd = open_directory(directory)
    try:
        yield FsqRoot(directory, known, fd)
    finally:
        os.close(fd)


def owner_options(function: F) -> F:
    """Add the options `-o`, `-g` and `-m`."""
    for option in (
        click.option(
            "-m", "--mode", metavar="MODE", help="Octal mode of new files, instead of FSQ_QUEUE_MODE and FSQ_ITEM_MODE."
        ),
        click.option("-g", "--group", metavar="GROUP", help="Group of new files, by name or number."),
        click.option("-o", "--owner", metavar="USER", help="Owner of new files, by name or number."),
    ):
        function = option(function)
    return function
