"""What every command shares: where its options come from, how it reaches a backend, and how it starts a loop."""

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
from qworker.duration import LONGEST, parse_duration
from qworker.errors import InvalidURL, MissingExtra, UsageError
from qworker.extras import not_installed
from qworker.kit.directory.missing import require_directory
from qworker.message import State
from qworker.settings import setting
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
    "load_command",
    "positive_number",
    "run",
    "state_option",
    "url_option",
]

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
T = TypeVar("T")

_BATCH = 1000


class Group(click.Group):
    """A command with commands of its own, in the order in which a newcomer meets them.

    Args:
        args: for click.
        places: `module:attribute` of commands by name, which are imported when they are asked for.
        kwargs: for click.
    """

    # Words for its commands that people bring from other programs.
    synonyms: ClassVar[Mapping[str, str]] = {}

    def __init__(self, *args: Any, places: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 110})
        super().__init__(*args, **kwargs)
        self.help = keep_paragraphs(self.help)
        self._places = places or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, as they were added."""
        return [*self._places, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; None: there is none."""
        place = self._places.get(cmd_name)
        return super().get_command(ctx, cmd_name) if place is None else load_command(place, f"{self.name} {cmd_name}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Nothing at all asks for the list of commands, and is no mistake."""
        return super().parse_args(ctx, args or ["--help"])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of a name.

        Raises:
            UsageError: there is none; names the one that may have been meant.
        """
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        meant = self.synonyms.get(name) or self._meant_below(ctx, name) or did_you_mean(name, self.list_commands(ctx))
        path = ctx.command_path
        raise UsageError(f"unknown command {path} {name}: {meant or f'see {path} --help'}")

    def _meant_below(self, ctx: click.Context, name: str) -> str:
        """`did you mean GROUP NAME?` where one of its groups has a command of that name."""
        for group_name in self.list_commands(ctx):
            group = self.get_command(ctx, group_name)
            if isinstance(group, click.Group) and name in group.list_commands(ctx):
                return f"did you mean {group_name} {name}?"
        return ""


class Unavailable(click.Command):
    """A command that cannot be imported: it is listed with the reason, and calling it, even for help, raises that.

    Args:
        name: what is typed for it.
        error: why it cannot be imported.
    """

    def __init__(self, name: str, error: UsageError) -> None:
        reason = f"needs the extra {error.extra!r}" if isinstance(error, MissingExtra) else "cannot be imported"
        super().__init__(name, short_help=f"({reason})", add_help_option=False)
        self._error = error

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Raise the reason."""
        raise self._error


def load_command(place: str, name: str) -> click.Command:
    """Import the command at `module:attribute`; one that cannot be imported is `Unavailable`.

    Args:
        place: where it is.
        name: what is typed for it, after `qworker`.
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
    """A command whose every option may also come from `QWORKER_<OPTION>`, or from `[tool.qworker]` under it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = keep_paragraphs(self.help)
        for key, option in options_of(self).items():
            if option.allow_from_autoenv and option.envvar is None:
                option.envvar = PREFIX + key.upper()

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Give the context the file's table."""
        warn_of_unknown()
        extra.setdefault("default_map", file_defaults(self, _typed(info_name, parent)))
        extra.setdefault("max_content_width", 110)
        extra.setdefault("help_option_names", ["-h", "--help"])
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Understand the options; a bad value is blamed on the file or variable that it came from."""
        try:
            return super().parse_args(ctx, args)
        except (click.BadParameter, UsageError) as error:
            raise blamed(ctx, error) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; a reader of standard output that has gone away is the end of the work, and no error."""
        try:
            result = super().invoke(ctx)
            flush_output()
        except BrokenPipeError:
            silence_stdout()
            return 0
        return result


def _typed(name: str | None, parent: click.Context | None) -> list[str]:
    """What is typed for a command after `qworker`."""
    typed = [name or ""]
    while parent is not None and parent.parent is not None:
        typed.insert(0, parent.info_name or "")
        parent = parent.parent
    return typed


class URLCommand(Command):
    """A command whose first argument is a backend URL, which may also come from `QWORKER_URL` or `[tool.qworker]`.

    A queue's name has no colon and a URL has one, so that `qworker stats inbox` can be told from `qworker stats file:./spool`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the configured URL first where the command line has none."""
        configured = setting("url")
        if configured:
            # Click stores what is missing as a sentinel of its own: ask for what is there instead.
            first: object = self.make_parser(ctx).parse_args(list(args))[0].get("url")
            if not (isinstance(first, str) and ":" in first):
                args = [configured, *args]
        return super().parse_args(ctx, args)


def check_store(url: str) -> None:
    """Refuse a directory that is not there, for what opens the store by itself.

    Raises:
        StoreNotFound: there is none.
    """
    require_directory(open_backend(url).directory)


def batches(items: Iterable[T]) -> Iterator[list[T]]:
    """Items in lists of up to 1000."""
    remaining = iter(items)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


def json_option(function: F) -> F:
    """`--json`."""
    return click.option("--json", "json", is_flag=True, help="Print one JSON document instead of text.")(function)


def url_option(function: F) -> F:
    """`--url`, from the command line only: an app that names no URL takes `QWORKER_URL` by itself."""
    option = click.option(
        "--url",
        metavar="URL",
        allow_from_autoenv=False,
        help="Backend URL, instead of the app's own. QWORKER_URL is for apps that name no URL.",
    )
    return option(function)


def state_option(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """`--state`."""
    return click.option("--state", type=click.Choice([s.word for s in State]), default=default, help=help_text)


def item_limit_options(function: F) -> F:
    """`--ttl` and `--max-tries`, as fsq's programs have them."""
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


# What a program's exit status means, by fsq's option: its letter, its name, the meaning, and the default.
_EXIT_CODES = (
    ("-S", "--success-code", "success", "0; of fsq:, FSQ_SUCCESS"),
    ("-T", "--fail-tmp-code", "a temporary failure", "111; of fsq:, FSQ_FAIL_TMP"),
    ("-F", "--fail-perm-code", "a permanent failure", "100; of fsq:, FSQ_FAIL_PERM"),
)


def exit_code_options(function: F) -> F:
    """`--success-code`, `--fail-tmp-code` and `--fail-perm-code`, as fsq's programs have them."""
    # The last decorator that is applied is the first option of the help.
    for letter, name, meaning, default in reversed(_EXIT_CODES):
        text = f"Exit status for {meaning}. Default: {default}."
        function = click.option(letter, name, type=click.IntRange(0, 255), metavar="CODE", help=text)(function)
    return function


def keep_paragraphs(text: str | None) -> str | None:
    r"""A help text whose lines "\b" have become click's mark for a paragraph that keeps its lines."""
    return None if text is None else text.replace("\\b\n", "\b\n")


@asynccontextmanager
async def backend_from_url(url: str, *, make: bool = False) -> AsyncGenerator[Backend]:
    """The backend of a URL, reached, and let go of afterwards.

    Args:
        url: its URL.
        make: whether its directory is made where it is not there. What only looks makes none.

    Raises:
        InvalidURL: the URL is not known.
        StoreNotFound: there is no such directory.
        BackendUnavailable: nobody answers there.
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
    """Run a command's coroutine on a loop of its own."""
    return asyncio.run(coroutine)


def duration_type(*, least: float = 0.0, most: float = LONGEST) -> Callable[[str], float]:
    """Return an option's type: a time span as `parse_duration` reads it, in seconds."""

    # Its name is the option's metavariable.
    def duration(text: str) -> float:
        try:
            return parse_duration(text, least=least, most=most)
        except UsageError as error:
            raise click.BadParameter(str(error)) from None

    return duration


def positive_number(value: float, name: str) -> float:
    """`value` if it is more than 0.

    Raises:
        UsageError: it is not.
    """
    if value <= 0:
        raise UsageError(f"{name} must be more than 0 (got {value:g})")
    return value
