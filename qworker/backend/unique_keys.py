"""What the backends share about unique keys: ids for their messages, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from qworker.backend.deviations import refuse_unsupported
from qworker.errors import AlreadyEnqueued, UsageError
from qworker.message import Draft, KeyHolder
from qworker.names import check_key, created_id, to_message_id
from qworker.unique import check_due, debounced_due

__all__ = ["due_of", "give_ids", "held_error", "refuse_pending"]

NO_DEVIATIONS: Mapping[str, str] = MappingProxyType({})


def give_ids(
    drafts: Sequence[Draft], scheme: str = "", deviations: Mapping[str, str] = NO_DEVIATIONS
) -> Sequence[Draft]:
    """Give each draft with a unique key an id, if it has none. Return the same drafts if none has a unique key.

    Args:
        drafts: The drafts to publish.
        scheme: The backend's scheme, for the error.
        deviations: `Backend.deviations`, if nothing else has refused these drafts.

    Raises:
        InvalidName: A key is empty or too long.
        NotSupported: The protocol does not support what a key asks for.
        UsageError: A draft has options of a unique key and no key, or a due time and a debounce, which sets it.
    """
    for draft in drafts:
        if draft.unique_key is not None or draft.unique is not None:
            break
    else:
        return drafts
    refuse_unsupported(scheme, deviations, drafts)
    return [_with_id(draft) for draft in drafts]


def _with_id(draft: Draft) -> Draft:
    if draft.unique is not None:
        if draft.unique_key is None:
            raise UsageError("unique= needs unique_key=: give the message a key")
        check_due(draft.unique, draft.delay, draft.due_at)
    if draft.unique_key is None:
        return draft
    check_key(draft.unique_key)
    if draft.id is not None:
        return draft
    return msgspec.structs.replace(draft, id=created_id())


def due_of(draft: Draft, now: float, first: float) -> float:
    """Return when a draft is due, in Unix seconds.

    Args:
        draft: The draft.
        now: The store's time.
        first: When the first call with its unique key was published; `now` for the first one.
    """
    if draft.unique is not None and draft.unique.again == "debounce":
        return debounced_due(draft.unique, now, first)
    return now + draft.delay if draft.due_at is None else draft.due_at


def refuse_pending(drafts: Iterable[Draft], ids: Iterable[str]) -> None:
    """Refuse drafts with `again="error"` whose key another message has.

    Args:
        drafts: The drafts, with their ids.
        ids: What `publish` returns for them.

    Raises:
        AlreadyEnqueued: There is one.
    """
    for draft, stored in zip(drafts, ids, strict=True):
        if draft.unique is None or draft.unique.again != "error":
            continue
        assert draft.id is not None
        if stored != to_message_id(draft.id):
            raise AlreadyEnqueued(
                f"a message with the unique key {draft.unique_key!r} is already enqueued: {stored}", stored
            )


def held_error(key: str, holder: str) -> AlreadyEnqueued:
    """Return the refusal of a requeue. A `KeyHolder` is in another queue."""
    where = f" in {holder.queue}" if isinstance(holder, KeyHolder) else ""
    return AlreadyEnqueued(f"unique key {key!r} is held by {holder}{where}: remove that message first", holder)
