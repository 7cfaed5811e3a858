"""The parts that commands share: their options, the backend of a URL, and the event loop."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, ClassVar, TypeVar

import click

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.cli.configured import PREFIX, blamed, did_you_mean, file_defaults, options_of, warn_of_unknown
from qworker.duration import LONGEST, parse_duration, parse_moment
from qworker.errors import InvalidURL, MissingExtra, UsageError
from qworker.extras import not_installed
from qworker.kit.directory.missing import require_directory
from qworker.message import State
from qworker.settings import setting
from qworker.size import parse_size
from qworker.streams import flush_output, silence_stdout

__all__ = [
    "Command",
    "Group",
    "URLCommand",
    "Unavailable",
    "backend_from_url",
    "batches",
    "check_store",
    "duration_type",
    "exit_code_options",
    "item_limit_options",
    "json_option",
    "keep_paragraphs",
    "limit_option",
    "listen_options",
    "load_command",
    "moment_type",
    "positive_number",
    "run",
    "size_type",
    "state_option",
    "url_option",
]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")

_BATCH = 1000


class Group(click.Group):
    """A group of commands, which are imported when they are used.

    Args:
        args: The arguments of `click.Group`.
        places: `module:attribute` of the commands by name, in the order of the help.
        kwargs: The keyword arguments of `click.Group`.
    """

    # The names of commands in other programs, with advice.
    synonyms: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *args: Any, places: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 110})
        super().__init__(*args, **kwargs)
        self.help = keep_paragraphs(self.help)
        self._places = places or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order in which they were added."""
        return [*self._places, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with a name, or None."""
        place = self._places.get(cmd_name)
        return super().get_command(ctx, cmd_name) if place is None else load_command(place, f"{self.name} {cmd_name}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Without arguments, show the help with exit status 0."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name.

        Raises:
            UsageError: No command has this name. The text names a similar one.
        """
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        meant = self.synonyms.get(name) or self._meant_below(ctx, name) or did_you_mean(name, self.list_commands(ctx))
        path = ctx.command_path
        raise UsageError(f"unknown command {path} {name}: {meant or f'see {path} --help'}")

    def _meant_below(self, ctx: click.Context, name: str) -> str:
        """Return `did you mean GROUP NAME?` if a subgroup has a command with this name, or an empty text."""
        for group_name in self.list_commands(ctx):
            group = self.get_command(ctx, group_name)
            if isinstance(group, click.Group) and name in group.list_commands(ctx):
                return f"did you mean {group_name} {name}?"
        return ""


class Unavailable(click.Command):
    """A command that cannot be imported. It is listed with the reason, and a call of it raises the error.

    Args:
        name: The name of the command.
        error: The error of the import.
    """

    def __init__(self, name: str, error: UsageError) -> None:
        reason = f"needs the extra {error.extra!r}" if isinstance(error, MissingExtra) else "cannot be imported"
        super().__init__(name, short_help=f"({reason})", add_help_option=False)
        self._error = error

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Raise the error of the import."""
        raise self._error


def load_command(place: str, name: str) -> click.Command:
    """Import a command. If this fails, return an `Unavailable` one.

    Args:
        place: The command as `module:attribute`.
        name: The words that call it, after `qworker`.
    """
    module, _, attribute = place.partition(":")
    try:
        command = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        return Unavailable(name, not_installed(error, f"qworker {name}"))
    except Exception as error:  # noqa: BLE001 - another package's: it must not take the list of commands with it
        return Unavailable(name, UsageError(f"qworker {name}: {place} cannot be imported: {error!r}"))
    if not isinstance(command, click.Command):
        return Unavailable(name, UsageError(f"qworker {name}: {place} is not a click command"))
    return command


class Command(click.Command):
    """A command whose options can also be set as `QWORKER_<OPTION>` or in `[tool.qworker]`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = keep_paragraphs(self.help)
        for key, option in options_of(self).items():
            if option.allow_from_autoenv and option.envvar is None:
                option.envvar = PREFIX + key.upper()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Create the context with the settings of the file as defaults."""
        warn_of_unknown()
        extra.setdefault("default_map", file_defaults(self, _typed(info_name, parent)))
        extra.setdefault("max_content_width", 110)
        extra.setdefault("help_option_names", ["-h", "--help"])
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options. The error of an invalid value names the file or variable that has it."""
        try:
            return super().parse_args(ctx, args)
        except (click.BadParameter, UsageError) as error:
            raise blamed(ctx, error) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. If the reader of standard output is gone, end without an error."""
        try:
            result = super().invoke(ctx)
            flush_output()
        except BrokenPipeError:
            silence_stdout()
            return 0
        return result


def _typed(name: str | None, parent: click.Context | None) -> list[str]:
    """Return the words that call a command, after `qworker`."""
    typed = [name or ""]
    while parent is not None and parent.parent is not None:
        typed.insert(0, parent.info_name or "")
        parent = parent.parent
    return typed


class URLCommand(Command):
    """A command whose first argument is a backend URL. Without it, `QWORKER_URL` or `[tool.qworker]` is used.

    A URL has a colon and the name of a queue has none, so `qworker stats inbox` is different from `qworker stats
    file:./spool`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. If the command line has no URL, put the configured one first."""
        configured = setting("url")
        if configured:
            # Click stores a sentinel for a missing argument, so this checks for text.
            first: object = self.make_parser(ctx).parse_args(list(args))[0].get("url")
            if not (isinstance(first, str) and ":" in first):
                args = [configured, *args]
        return super().parse_args(ctx, args)


def check_store(url: str) -> None:
    """Check that the directory of a store exists, before other code opens the store.

    Raises:
        StoreNotFound: The directory does not exist.
    """
    require_directory(open_backend(url).directory)


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of up to 1000."""
    remaining = iter(items)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def json_option(function: F) -> F:
    """Add the option `--json`."""
    return click.option("--json", "json", is_flag=True, help="Print one JSON document instead of text.")(function)


def url_option(function: F) -> F:
    """Add the option `--url`, from the command line only, because an app without a URL reads `QWORKER_URL` itself."""
    option = click.option(
        "--url",
        metavar="URL",
        allow_from_autoenv=False,
        help="Backend URL, instead of the app's own. QWORKER_URL is for apps that name no URL.",
    )
    return option(function)


def state_option(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """Add the option `--state`."""
    return click.option("--state", type=click.Choice([s.word for s in State]), default=default, help=help_text)


def limit_option(help_text: str) -> Callable[[F], F]:
    """Add the option `--limit` of a list."""
    return click.option(
        "-n", "--limit", type=click.IntRange(1), metavar="N", default=20, show_default=True, help=help_text
    )


def listen_options(port: int) -> Callable[[F], F]:
    """Add the options `--host` and `--port` of a server. By default, it listens on this port of this machine only."""

    def add(function: F) -> F:
        host = click.option(
            "--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on."
        )
        number = click.option(
            "--port",
            metavar="PORT",
            type=int,
            default=port,
            show_default=True,
            help="Port to listen on. 0: a free port.",
        )
        return host(number(function))

    return add


def item_limit_options(function: F) -> F:
    """Add the options `--ttl` and `--max-tries` of fsq's programs."""
    ttl = click.option(
        "-t",
        "--ttl",
        type=duration_type(),
        help="Maximum age of an item. Older items fail. 0: no limit. Default: 0; of fsq:, FSQ_TTL.",
    )
    max_tries = click.option(
        "-m",
        "--max-tries",
        type=click.IntRange(0),
        metavar="N",
        help="Maximum number of tries of an item. Then it fails. 0: no limit. Default: 1; of fsq:, FSQ_MAX_TRIES.",
    )
    return ttl(max_tries(function))


# fsq's options for the exit status of a program: the letter, the name, the meaning, and the default.
_EXIT_CODES = (
    ("-S", "--success-code", "success", "0; of fsq:, FSQ_SUCCESS"),
    ("-T", "--fail-tmp-code", "a temporary failure", "111; of fsq:, FSQ_FAIL_TMP"),
    ("-F", "--fail-perm-code", "a permanent failure", "100; of fsq:, FSQ_FAIL_PERM"),
)


def exit_code_options(function: F) -> F:
    """Add the options `--success-code`, `--fail-tmp-code` and `--fail-perm-code` of fsq's programs."""
    # The option that is added last is the first one in the help.
    for letter, name, meaning, default in reversed(_EXIT_CODES):
        text = f"Exit status for {meaning}. Default: {default}."
        function = click.option(letter, name, type=click.IntRange(0, 255), metavar="CODE", help=text)(function)
    return function


def keep_paragraphs(text: str | None) -> str | None:
    r"""Return a help text with click's mark for paragraphs that keep their lines, in place of lines "\b"."""
    return None if text is None else text.replace("\\b\n", "\b\n")


@asynccontextmanager
async def backend_from_url(url: str, *, make: bool = False) -> AsyncGenerator[Backend]:
    """Open the backend of a URL, and close it after the block.

    Args:
        url: The URL.
        make: Whether to create the directory of the store if it does not exist. Commands that only read do not.

    Raises:
        InvalidURL: The URL is not valid.
        StoreNotFound: The directory does not exist.
        BackendUnavailable: The store cannot be reached.
    """
    backend = open_backend(url)
    if not make:
        require_directory(backend.directory)
    if not backend.shared:
        await backend.aclose()
        raise InvalidURL(
            f"{backend.describe()}: queues exist only in the process that created them: use file: or redis:"
        )
    try:
        await backend.open()
        yield backend
    finally:
        await backend.aclose()


def run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run the coroutine of a command on a new event loop."""
    return asyncio.run(coroutine)


def duration_type(*, least: float = 0.0, most: float = LONGEST) -> Callable[[str], float]:
    """Return the type of an option that is a duration in seconds. See `parse_duration`."""

    # Click takes the metavariable from the name of this function.
    def duration(text: str) -> float:
        try:
            return parse_duration(text, least=least, most=most)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None

    return duration


def moment_type(text: str) -> float:
    """Return the Unix seconds of an option that is an age or a time. See `parse_moment`."""
    try:
        return parse_moment(text)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def size_type(*, least: int = 0) -> Callable[[str], int]:
    """Return the type of an option that is a size in bytes. See `parse_size`."""

    # Click takes the metavariable from the name of this function.
    def size(text: str) -> int:
        try:
            return parse_size(text, least=least)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None

    return size


def positive_number(value: float, name: str) -> float:
    """Return `value` if it is more than 0.

    Raises:
        UsageError: The value is not more than 0.
    """
    if value <= 0:
        raise UsageError(f"{name} must be more than 0 (got {value:g})")
    return value
