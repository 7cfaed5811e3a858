"""The arguments of the publish script for drafts, with their ids."""

from __future__ import annotations

from collections.abc import Sequence

from qworker.clock import Clock
from qworker.message import Draft
from qworker_redis.codec import PlainDraft
from qworker_redis.rfq.codec import encode
from qworker_redis.rfq.ids import derive_id, new_ids, to_ticks

__all__ = ["DraftEncoder"]


class DraftEncoder:
    """Encodes the drafts of one backend.

    Args:
        clock: The time of new ids.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The time in the last id that was derived from an id of another store.
        self._last_derived = 0

    def encode(self, drafts: Sequence[Draft]) -> list[PlainDraft]:
        """Encode drafts, with a new id for each that has none."""
        ids = new_ids(len(drafts), self._clock.time())
        return [encode(self._id(new_id, draft), draft) for new_id, draft in zip(ids, drafts, strict=True)]

    def _id(self, new_id: str, draft: Draft) -> str:
        if draft.id is not None:
            return draft.id
        if draft.original_id is None or draft.enqueued_at is None:
            return new_id
        # The times rise, like those of new ids, because some stores have no other order than that of ids.
        self._last_derived = max(to_ticks(draft.enqueued_at), self._last_derived + 1)
        return derive_id(draft.original_id, self._last_derived)
