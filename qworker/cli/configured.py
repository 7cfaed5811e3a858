"""Options from the environment and from pyproject.toml: their names there, their values, and what nobody reads.

A wrong name would have no effect, which is noticed late: an unknown variable is warned of, since the environment belongs to others too,
and an unknown key of `[tool.qworker]`, which belongs to qworker alone, is an error.
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

# What variables begin with.
PREFIX = "QWORKER_"

# Every option of qworker's own commands, as it is called in a file. Written down, since loading all commands to ask them takes longer
# than most commands do; a test compares.
_WRITTEN_DOWN = """
    add_host after all all_hosts app archive arg batch body burst compact concurrency conf delay delete destination down
    dry_run due_at empty_ok env error event fail_perm_code fail_tmp_code file follow force format from_file front full
    grace_period group health history host html id id_map ignore_down ignore_exists ignore_listener include_done
    include_failed insecure interval json keep kwargs limit lines link lock log_format log_level loop master
    max_body_size max_connections max_memory max_messages max_rate max_tries message messages mode msgid name newest
    no_done no_env no_lock no_open on once output owner page paused port priority protocol queue rejects reload
    shutdown_timeout since size source staging_dir stall_timeout state success_code task timeout topic trigger triggered
    ttl unique_key until url verbose visibility_timeout wait_for_backend where workers yes
"""
OPTIONS = frozenset(_WRITTEN_DOWN.split())

# Variables of qworker that are not options: what users may set, and what its processes hand on to one another.
VARIABLES = frozenset(
    {"QWORKER_URL", "QWORKER_HTTP_TOKEN", "QWORKER_HEALTH", "QWORKER_REDIS_PASSWORD", "QWORKER_REDIS_SENTINEL_PASSWORD"}
)
_INTERNAL = frozenset({"QWORKER_CONTROL_FD", "QWORKER_HEALTH_FD", "QWORKER_REPLACES_PROCESS", "QWORKER_DEMO_LOG"})

# A variable is warned of only if it is this similar to an option: Kubernetes, for one, sets QWORKER_SERVICE_HOST for a service of that name.
_SIMILAR = 0.75


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """`did you mean X?` with the most similar of `known`, and `prefix` before it; empty where none is."""
    # Imported late: only mistakes need it.
    import difflib

    found = difflib.get_close_matches(word, known, 1, cutoff)
    return f"did you mean {prefix}{found[0]}?" if found else ""


def key_of(option: click.Option) -> str:
    """What an option is called in a file, and after `QWORKER_`, in capitals, in the environment."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def options_of(command: click.Command) -> dict[str, click.Option]:
    """A command's options by `key_of`."""
    return {key_of(param): param for param in command.params if isinstance(param, click.Option)}


def walk(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command of a group and of the groups in it, with the words that are typed for it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None:
            yield (*above, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*above, name))


# -- the environment ---------------------------------------------------------------------------------------------------


def warn_of_unknown() -> None:
    """Say on standard error which variables are like an option's, and are none."""
    names = [name for name in os.environ if name.startswith(PREFIX)]
    if not _INTERNAL.isdisjoint(names):
        # A process of a worker: the one that started it has said so.
        return
    known = {_variable(option) for option in OPTIONS} | VARIABLES
    for name in sorted({*names} - known):
        # By what follows the prefix, which all of them share.
        meant = did_you_mean(name.removeprefix(PREFIX), (one.removeprefix(PREFIX) for one in known), PREFIX, _SIMILAR)
        if meant and name not in map(_variable, all_options(root_group())):
            echo(f"qworker: {name} is not an option of any command: {meant}", err=True)


def _variable(option: str) -> str:
    return PREFIX + option.upper()


def root_group() -> click.Group | None:
    """The group of all commands; None while a command runs alone."""
    context = click.get_current_context(silent=True)
    command = None if context is None else context.find_root().command
    return command if isinstance(command, click.Group) else None


def all_options(root: click.Group | None) -> set[str]:
    """The options of all commands, those of other packages among them."""
    return set() if root is None else {key for _, command in walk(root) for key in options_of(command)}


# -- the file ----------------------------------------------------------------------------------------------------------


def file_defaults(command: click.Command, path: Sequence[str]) -> dict[str, Any]:
    """What `[tool.qworker]`, and over it `[tool.qworker.<command>]`, say for a command's parameters.

    Args:
        command: whose parameters.
        path: what is typed for it: `[tool.qworker.pipeline.load]` is the table of `qworker pipeline load`.

    Raises:
        UsageError: the file has a key that no option has, or a value that cannot be one.
    """
    table = file_settings()
    own: Mapping[str, Any] = table
    for name in path:
        found: object = own.get(name)
        # Else an option of another command has the name of this one, such as `message`.
        own = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    _check_keys(command, path, table, own)
    given = {key.replace("-", "_"): value for key, value in {**table, **own}.items() if not isinstance(value, dict)}
    # An app's own URL is what everybody else who enqueues there uses: only the command line overrides it.
    given.pop("url", None)
    options = options_of(command)
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
    """Refuse a table that is no command's, and an option in the table of a group."""
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
    """A value of the file as the environment would give it: as text, or several."""
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
    """The error of a bad value, with the place that it came from where that is not the command line."""
    for param in ctx.command.params:
        name = param.name or ""
        # The one whose value was being understood: its source is known, its value is not.
        source = ctx.get_parameter_source(name)
        if name in ctx.params or not isinstance(param, click.Option):
            continue
        text = error.message if isinstance(error, click.ClickException) else str(error)
        if source is ParameterSource.DEFAULT_MAP:
            return UsageError(f"{settings_path()}: {key_of(param).replace('_', '-')}: {text}")
        if source is ParameterSource.ENVIRONMENT:
            return UsageError(f"{param.envvar}: {text}")
    return error
