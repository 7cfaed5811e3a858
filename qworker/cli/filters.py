"""The options that choose messages by what they are: `--task`, `--error`, `--code`, `--since` and `--group`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from qworker.cli.options import moment_type
from qworker.errors import UsageError
from qworker.failures.message_filter import CODES, MessageFilter
from qworker.message import State

__all__ = ["FILTERS", "filter_options", "states_of"]

F = TypeVar("F", bound=Callable[..., Any])

FILTERS = "--task, --error, --code, --since or --group"

_OPTIONS = (
    click.option("--task", "tasks", multiple=True, metavar="NAME", help="Only calls of this task; repeatable."),
    click.option("--error", metavar="TEXT", help="Only failed messages whose error contains this text, in any case."),
    click.option(
        "--code",
        "codes",
        multiple=True,
        type=click.Choice(CODES),
        help="Only messages that failed for this reason; repeatable.",
    ),
    click.option(
        "--since",
        type=moment_type,
        metavar="TIME",
        help="Only messages that finished since then: an age such as 2h, or a time such as 2026-11-23T08:00 (UTC).",
    ),
    click.option(
        "--group",
        "groups",
        multiple=True,
        metavar="GROUP",
        # `qworker fsq create` has another option of this name.
        allow_from_autoenv=False,
        help="Only failed messages of this group, from `qworker failures`; repeatable.",
    ),
)


def filter_options(command: F) -> F:
    """Add the options. The function of the command gets them as its argument `matching`, a `MessageFilter`."""

    @functools.wraps(command)
    def filtered(
        *args: Any,
        tasks: tuple[str, ...],
        error: str | None,
        codes: tuple[str, ...],
        since: float | None,
        groups: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        matching = MessageFilter(tasks=tasks, error=error, codes=codes, since=since, groups=groups)
        return command(*args, matching=matching, **kwargs)

    # The option that is added last is the first one in the help.
    for option in reversed(_OPTIONS):
        filtered = option(filtered)
    return filtered  # type: ignore[return-value]


def states_of(state: str | None, matching: MessageFilter) -> list[State]:
    """Return the states whose messages can match, out of the one of the option `--state` or of all.

    Raises:
        UsageError: No message in the state can match.
    """
    possible = [State.FAILED] if matching.is_of_failed else [State.DONE, State.FAILED]
    if not matching.is_of_finished:
        possible = list(State)
    if state is None:
        return possible
    chosen = State.of_word(state)
    if chosen not in possible:
        options = "--error, --code and --group need" if matching.is_of_failed else "--since needs"
        raise UsageError(f"{options} --state {' or '.join(one.word for one in possible)} (got {state})")
    return [chosen]
