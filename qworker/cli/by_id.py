"""Requeue or remove messages by their ids, and name those that are not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from qworker.backend import Backend
from qworker.cli.output import echo
from qworker.message import Selection, State, StoredMessage
from qworker.names import id_forms

__all__ = ["Change", "change_by_id", "count_by_id", "print_missed"]

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


def print_missed(verb: str, queue: str, count: int, ids: Sequence[str], missed: Mapping[str, str]) -> None:
    """Print on standard error which messages were not changed."""
    named = ", ".join(f"{message_id} ({why})" for message_id, why in missed.items())
    rest = f"{len(ids) - count:,} of {len(ids):,} ids, which are not there"
    if verb == "requeued":
        rest += " or have not failed"
    echo(f"qworker: not {verb} in {queue}: {named or rest}", err=True)
