"""What these commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec

from qworker.backend.scan_source import ScanError
from qworker.cli.options import URLCommand
from qworker.cli.output import say
from qworker.errors import InvalidURL, QworkerError, UsageError
from qworker.url import BackendURL
from qworker_fsq.environment import Constants
from qworker_fsq.options import FsqOptions, root_of
from qworker_fsq.requeue_item import open_root

__all__ = ["EXIT_TEMPORARY", "EXIT_USAGE", "FsqCommand", "Place", "complain", "owner_options", "placed", "shout"]

EXIT_TEMPORARY, EXIT_USAGE = 111, 100

F = TypeVar("F", bound=Callable[..., Any])


class FsqCommand(URLCommand):
    """A command that takes an `fsq:` URL, and ends with fsq's statuses."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Wrong usage ends with status 100."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            error.show()
            raise click.exceptions.Exit(EXIT_USAGE) from error
        except UsageError as error:
            shout(f"qworker: {error}")
            raise click.exceptions.Exit(EXIT_USAGE) from error

    def invoke(self, ctx: click.Context) -> Any:
        """What goes wrong is one line, and status 100 or 111."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            shout(f"qworker: {error}")
            return EXIT_USAGE
        except (QworkerError, ScanError) as error:
            shout(f"qworker: {error}")
        except OSError as error:
            name = "" if error.filename is None else f"{error.filename}: "
            shout(f"qworker: {name}{error.strerror}")
        return EXIT_TEMPORARY


class Place(msgspec.Struct, frozen=True):
    """Where the queues are, and what their parts are called."""

    directory: str
    constants: Constants
    # An open descriptor.
    root: int


def complain(verbose: bool) -> Callable[[str], None]:
    """Prints a line if `verbose`."""
    return shout if verbose else lambda _text: None


def shout(text: str) -> None:
    """Print a line on standard error."""
    say(text, err=True)


@contextmanager
def placed(url: str, **constants: str | None) -> Generator[Place]:
    """The root of an `fsq:` URL.

    Args:
        url: as given.
        constants: over what the environment says; None: what that says.

    Raises:
        InvalidURL: it is none.
        OSError: there is no such directory.
    """
    parsed = BackendURL.parse(url)
    if parsed.scheme != "fsq":
        raise InvalidURL(f"{parsed.masked}: this is for queues of fsq: write fsq:///var/fsq")
    given = {name: value for name, value in constants.items() if value is not None}
    known = FsqOptions.from_url(parsed).constants.changed(**given)
    directory = str(root_of(parsed, known))
    root = open_root(directory)
    try:
        yield Place(directory, known, root)
    finally:
        os.close(root)


def owner_options(function: F) -> F:
    """`-o`, `-g` and `-m`."""
    for option in (
        click.option(
            "-m", "--mode", metavar="MODE", help="Octal mode of new files, instead of FSQ_QUEUE_MODE and FSQ_ITEM_MODE."
        ),
        click.option("-g", "--group", metavar="GROUP", help="Group of new files, by name or number."),
        click.option("-o", "--owner", metavar="USER", help="Owner of new files, by name or number."),
    ):
        function = option(function)
    return function
