"""Refuse drafts with properties that a protocol does not support, by the deviations that its backend declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from qworker.cell import CellWatch
from qworker.errors import NotSupported, UsageError
from qworker.message import Draft
from qworker.unique import Unique
from qworker.validation import check_whole

__all__ = ["check_draft", "check_hold", "no_cells", "refuse_cancel", "refuse_unsupported", "refuse_watches"]

# For each rule: the property that a draft asks for, and what to do instead.
_ASKED = {
    "priority": ("priorities", "publish without one, or use another queue for urgent messages"),
    "unique_key": ("unique keys", "publish without one, or use redis:"),
    "unique_replace": ('again="replace" and again="debounce"', 'use again="keep", or use redis:'),
    "unique_app": ('unique keys with scope="app"', 'use scope="queue"'),
    "given_ids": ("given ids", "publish without an id"),
    "hold": ("holds", "publish without one, or use redis: or file:"),
    "fields": ("fields", "put them into the body"),
    "argv": ("arguments", "put them into the body"),
    "delay": ("delays", "publish without one"),
    "empty_bodies": ("empty bodies", "put something into the body"),
    "cells": ("cells", "use redis: or file:"),
}


def check_hold(draft: Draft) -> None:
    """Check that a draft with a hold has an id.

    Raises:
        UsageError: It has none.
    """
    if draft.hold > 0 and draft.id is None:
        raise UsageError("hold= needs id=: give the message an id")


def check_draft(draft: Draft) -> None:
    """Check the priority of a draft, and that a draft with a hold has an id.

    Raises:
        UsageError: The priority is not a whole number from 0 to 9, or there is a hold and no id.
    """
    if draft.priority:
        check_whole("priority", draft.priority, 0, 9)
    check_hold(draft)


def refuse_unsupported(
    scheme: str,
    deviations: Mapping[str, str],
    drafts: Iterable[Draft],
    *,
    takes_id: Callable[[str], bool] | None = None,
    now: float = 0.0,
) -> None:
    """Refuse drafts that ask for something that a protocol does not support.

    Args:
        scheme: The backend's scheme, for the error.
        deviations: `Backend.deviations`.
        drafts: The drafts to publish.
        takes_id: Returns whether an id can be given although the protocol deviates from `given_ids`. None: no id can
            be given.
        now: The time, in Unix seconds. A `due_at` that has passed is not a delay. Needed only by a protocol that
            deviates from `delay`.

    Raises:
        NotSupported: A draft asks for such a property. The text says what to do instead.
        UsageError: A draft has a hold and no id, or a priority that is not from 0 to 9.
    """
    for draft in drafts:
        if draft.priority:
            _refuse("priority", scheme, deviations)
            check_draft(draft)
        if draft.unique_key is not None or draft.unique is not None:
            _refuse_key(draft.unique, scheme, deviations)
        if draft.id is not None and (takes_id is None or not takes_id(draft.id)):
            _refuse("given_ids", scheme, deviations)
        if draft.hold > 0:
            check_hold(draft)
            _refuse("hold", scheme, deviations)
        if draft.fields:
            _refuse("fields", scheme, deviations)
        if draft.argv:
            _refuse("argv", scheme, deviations)
        if draft.delay > 0 if draft.due_at is None else draft.due_at > now:
            _refuse("delay", scheme, deviations)
        if not draft.body:
            _refuse("empty_bodies", scheme, deviations)


def _refuse_key(unique: Unique | None, scheme: str, deviations: Mapping[str, str]) -> None:
    _refuse("unique_key", scheme, deviations)
    if unique is None:
        return
    if unique.replaces:
        _refuse("unique_replace", scheme, deviations)
    if unique.scope == "app":
        _refuse("unique_app", scheme, deviations)


def _refuse(rule: str, scheme: str, deviations: Mapping[str, str]) -> None:
    if rule in deviations:
        raise _unsupported(rule, scheme, deviations)


def _unsupported(rule: str, scheme: str, deviations: Mapping[str, str]) -> NotSupported:
    what, instead = _ASKED[rule]
    return NotSupported(f"{scheme}: does not support {what} ({deviations[rule]}): {instead}")


def refuse_watches(scheme: str, deviations: Mapping[str, str], cells: Sequence[CellWatch]) -> None:
    """Refuse to wait for cells.

    Raises:
        NotSupported: There are cells to wait for.
    """
    if cells:
        raise no_cells(scheme, deviations)


def no_cells(scheme: str, deviations: Mapping[str, str]) -> NotSupported:
    """Return the error of a backend that deviates from the rule `cells`.

    Args:
        scheme: The backend's scheme, for the error.
        deviations: `Backend.deviations`.
    """
    return _unsupported("cells", scheme, deviations)


def refuse_cancel(scheme: str, deviations: Mapping[str, str]) -> NoReturn:
    """Refuse to cancel messages, for a backend that deviates from the rule `cancel`.

    Args:
        scheme: The backend's scheme, for the error.
        deviations: `Backend.deviations`.

    Raises:
        NotSupported: Always. The text says what to do instead.
    """
    raise NotSupported(f"{scheme}: does not support cancel ({deviations['cancel']}): remove the message")
