"""Requeue or remove messages by their ids, and name those that are not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from qworker.backend import Backend
from qworker.cli.output import echo, print_json
from qworker.message import Selection, State, StoredMessage
from qworker.names import counted, id_forms

__all__ = ["Change", "change_by_id", "count_by_id", "print_change_by_id", "verb_of"]

_EXIT_MISSED = 1

# Up to this number of messages are changed one by one, to name those that fail. More are only counted, in one step.
_NAMED = 100

# `Backend.requeue` or `Backend.remove`.
Change: TypeAlias = Callable[[str, Selection], Awaitable[int]]


async def change_by_id(
    backend: Backend, change: Change, queue: str, ids: Sequence[str], *, failed_only: bool
) -> tuple[int, dict[str, str]]:
    """Change messages. Return the number of changed ones, and the ids and reasons of the others."""
    if len(ids) > _NAMED:
        return await change(queue, Selection(ids=[form for given in ids for form in id_forms(given)])), {}
    left = [given for given in ids if not await change(queue, Selection(ids=id_forms(given)))]
    return len(ids) - len(left), (await count_by_id(backend, queue, left, failed_only=failed_only))[1]


async def count_by_id(
    backend: Backend, queue: str, ids: Sequence[str], *, failed_only: bool
) -> tuple[int, dict[str, str]]:
    """Return the number of messages that can be changed, and the ids and reasons of the others."""
    stored = await backend.find(queue, [form for given in ids for form in id_forms(given)]) if ids else []
    found = {one.message.id: one for one in stored}
    reasons = {
        given: _why_not(next((found[form] for form in id_forms(given) if form in found), None), failed_only)
        for given in ids
    }
    missed = {given: why for given, why in reasons.items() if why is not None}
    return len(ids) - len(missed), missed


def _why_not(stored: StoredMessage | None, failed_only: bool) -> str | None:
    if stored is None:
        return "there is no such message"
    return f"it is {stored.state.word}, not failed" if failed_only and stored.state is not State.FAILED else None


def verb_of(command: str, dry_run: bool) -> str:
    """Return what `remove` or `requeue` did, or would do."""
    return f"would {command}" if dry_run else f"{command}d"


def print_change_by_id(
    command: str, queue: str, ids: Sequence[str], found: tuple[int, dict[str, str]], *, dry_run: bool, json: bool
) -> int:
    """Print what `change_by_id` or `count_by_id` returned for `remove` or `requeue`. Return the exit status."""
    count, missed = found
    if json:
        print_json({"queue": queue, f"{command}d": count, "missed": missed, "dry_run": dry_run})
    else:
        echo(f"{verb_of(command, dry_run)} {counted(count, 'message')} of {queue}")
    if count == len(ids):
        return 0
    _print_missed(f"{command}d", queue, count, ids, missed)
    return _EXIT_MISSED


def _print_missed(verb: str, queue: str, count: int, ids: Sequence[str], missed: Mapping[str, str]) -> None:
    named = ", ".join(f"{message_id} ({why})" for message_id, why in missed.items())
    rest = f"{len(ids) - count:,} of {len(ids):,} ids, which are not there"
    if verb == "requeued":
        rest += " or have not failed"
    echo(f"qworker: not {verb} in {queue}: {named or rest}", err=True)
