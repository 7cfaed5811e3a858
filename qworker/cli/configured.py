"""Options from the environment and from pyproject.toml, and checks for unknown names there.

A misspelled name would have no effect, and users would notice it late. An unknown key in `[tool.qworker]` is an error,
because this table belongs to qworker. An unknown variable gives only a warning, because other programs set variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import click
from click.core import ParameterSource

from qworker.cli.output import echo
from qworker.errors import UsageError
from qworker.settings import file_settings, settings_path

__all__ = [
    "OPTIONS",
    "PREFIX",
    "VARIABLES",
    "all_options",
    "blamed",
    "did_you_mean",
    "file_defaults",
    "key_of",
    "options_of",
    "root_group",
    "walk",
    "warn_of_unknown",
]

# The prefix of all variables.
PREFIX = "QWORKER_"

# The names in a file of all options of qworker's own commands. This is a list, because it takes longer to import all
# commands than to run most of them. A test compares it with the commands.
_WRITTEN_DOWN = """
    add_host after all all_hosts allowed_host app archive arg args batch body burst cancel catch_up code compact
    concurrency conf connections_per_address cron delay delete destination down dry_run due_at edit empty_ok env
    error event every expires fail_perm_code fail_tmp_code file follow force format from_file front full
    grace_period group health history hold host html id id_map ignore_down ignore_exists ignore_listener
    include_done include_failed insecure interval isolated json keep kwargs limit lines link lock log_format
    log_level loop master max_body_size max_connections max_memory max_messages max_rate max_tries memory message
    messages mode msgid name newest no_done no_env no_lock no_open no_schedules on once open output overlap owner
    page paused port priority protocol queue read_only rejects reload result root_path shutdown_timeout since size
    source staging_dir stall_timeout state strict success_code task timeout topic trigger triggered ttl tz ui
    unique_key unix until url verbose visibility_timeout wait wait_for_backend where workers yes
"""
OPTIONS = frozenset(_WRITTEN_DOWN.split())

# Variables that are not options: users can set the first ones, and qworker passes the internal ones to its processes.
VARIABLES = frozenset(
    {
        "QWORKER_URL",
        "QWORKER_HTTP_TOKEN",
        "QWORKER_HEALTH",
        "QWORKER_REDIS_PASSWORD",
        "QWORKER_REDIS_SENTINEL_PASSWORD",
        "QWORKER_UI_TOKEN",
        "QWORKER_UI_VIEW_TOKEN",
        "QWORKER_UI_SECRET",
    }
)
_INTERNAL = frozenset(
    {"QWORKER_CONTROL_FD", "QWORKER_HEALTH_FD", "QWORKER_REPLACES_PROCESS", "QWORKER_DEMO_LOG", "QWORKER_COMMAND_START"}
)

# Only a variable that is this similar to an option gives a warning. Kubernetes sets variables such as
# QWORKER_SERVICE_HOST for a service named qworker.
_SIMILAR = 0.75


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return `did you mean X?` with `prefix` and the most similar of `known`, or an empty text."""
    # The import is slow, and only mistakes need it.
    import difflib

    found = difflib.get_close_matches(word, known, 1, cutoff)
    return f"did you mean {prefix}{found[0]}?" if found else ""


def key_of(option: click.Option) -> str:
    """Return the name of an option in the file. In the environment it is in capitals, after `QWORKER_`."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their names in the file."""
    return {key_of(param): param for param in command.params if isinstance(param, click.Option)}


def walk(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command of a group and of its subgroups, with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None:
            yield (*above, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*above, name))


# -- the environment ---------------------------------------------------------------------------------------------------


def warn_of_unknown() -> None:
    """Warn on standard error of variables that are similar to those of options but have no effect."""
    names = [name for name in os.environ if name.startswith(PREFIX)]
    if not _INTERNAL.isdisjoint(names):
        # This is a process of a worker. The process that started it has printed the warning.
        return
    # The last one is the name of QWORKER_HTTP_TOKEN in 0.1. Servers refuse it.
    known = {_variable(option) for option in OPTIONS} | VARIABLES | {"QWORKER_TOKEN"}
    for name in sorted({*names} - known):
        # The comparison leaves out the prefix, because all names have it.
        meant = did_you_mean(name.removeprefix(PREFIX), (one.removeprefix(PREFIX) for one in known), PREFIX, _SIMILAR)
        if meant and name not in map(_variable, all_options(root_group())):
            echo(f"qworker: {name} is not an option of any command: {meant}", err=True)


def _variable(option: str) -> str:
    return PREFIX + option.upper()


def root_group() -> click.Group | None:
    """Return the group of all commands, or None if a command runs without it."""
    context = click.get_current_context(silent=True)
    command = None if context is None else context.find_root().command
    return command if isinstance(command, click.Group) else None


def all_options(root: click.Group | None) -> set[str]:
    """Return the options of all commands, including those of other packages."""
    return set() if root is None else {key for _, command in walk(root) for key in options_of(command)}


# -- the file ----------------------------------------------------------------------------------------------------------


def file_defaults(command: click.Command, path: Sequence[str]) -> dict[str, Any]:
    """Return values for the parameters of a command from `[tool.qworker]` and `[tool.qworker.<command>]`.

    The table of the command has precedence.

    Args:
        command: The command.
        path: The words that call it: `[tool.qworker.pipeline.load]` is the table of `qworker pipeline load`.

    Raises:
        UsageError: The file has a key that is not an option, or a value that is not valid.
    """
    table = file_settings()
    own: Mapping[str, Any] = table
    for name in path:
        found: object = own.get(name)
        # A value that is not a table belongs to an option of another command with this name, such as `message`.
        own = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    _check_keys(command, path, table, own)
    options = options_of(command)
    # An option that means something else in another command has a value only in its own table.
    own_only = {key for key, option in options.items() if not option.allow_from_autoenv}
    shared = {key: value for key, value in table.items() if key.replace("-", "_") not in own_only}
    given = {key.replace("-", "_"): value for key, value in {**shared, **own}.items() if not isinstance(value, dict)}
    # Other processes enqueue at the URL of the app, so only the command line can override it.
    given.pop("url", None)
    return {options[key].name or "": _value(key, value, options[key]) for key, value in given.items() if key in options}


def _check_keys(command: click.Command, path: Sequence[str], table: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    mine = {*options_of(command)} - {"url"}
    for key in own:
        if key.replace("-", "_") not in mine:
            why = f"qworker {' '.join(path)} has no such option"
            raise _unknown(f"[tool.qworker.{'.'.join(path)}]", key, mine, why)
    options = {key for key, value in table.items() if not isinstance(value, dict)}
    for key in sorted(options):
        if key.replace("-", "_") not in OPTIONS and key.replace("-", "_") not in (
            known := OPTIONS | all_options(root_group())
        ):
            raise _unknown("[tool.qworker]", key, known, "no command has such an option")
    if table.keys() - options - {path[0]} or len(path) > 1:
        root = root_group()
        if root is not None:
            _check_tables(root, table, "")


def _check_tables(group: click.Group, table: Mapping[str, Any], above: str) -> None:
    """Refuse a table without a command, and an option in the table of a group."""
    context = click.Context(group)
    names = group.list_commands(context)
    for key, value in sorted(table.items()):
        if not isinstance(value, dict):
            if above:
                raise _unknown(f"[tool.qworker{above}]", key, (), "it has tables of commands only")
            continue
        if key not in names:
            raise _unknown(f"[tool.qworker{above}]", key, names, "there is no such command")
        command = group.get_command(context, key)
        if isinstance(command, click.Group):
            _check_tables(command, cast("dict[str, Any]", value), f"{above}.{key}")


def _unknown(where: str, key: str, known: Iterable[str], why: str) -> UsageError:
    spelled = [one.replace("_", "-") for one in known]
    return UsageError(f"{settings_path()}: {where} has {key!r}: {did_you_mean(key, spelled) or why}")


def _value(key: str, value: object, option: click.Option) -> object:
    """Return a value of the file as the environment would give it: as text, or as a list of texts."""
    if isinstance(value, bool) and option.is_flag:
        return value
    if isinstance(value, list):
        if not option.multiple:
            raise UsageError(f"{settings_path()}: {key} must be one value (got {value!r})")
        return [str(one) for one in cast("list[object]", value)]
    text = str(value)
    return text.split() if option.multiple else text


# -- both --------------------------------------------------------------------------------------------------------------


def blamed(ctx: click.Context, error: Exception) -> Exception:
    """Return the error of an invalid value. If the value is from the file or the environment, the text says so."""
    for param in ctx.command.params:
        name = param.name or ""
        # The error is of the parameter that has a source but no value yet.
        source = ctx.get_parameter_source(name)
        if name in ctx.params or not isinstance(param, click.Option):
            continue
        text = error.message if isinstance(error, click.ClickException) else str(error)
        if source is ParameterSource.DEFAULT_MAP:
            return UsageError(f"{settings_path()}: {key_of(param).replace('_', '-')}: {text}")
        if source is ParameterSource.ENVIRONMENT:
            return UsageError(f"{param.envvar}: {text}")
    return error
