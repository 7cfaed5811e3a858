"""What a store refuses, asked before a call is published."""

from __future__ import annotations

from qworker.backend.contract import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.errors import NotSupported
from qworker.kit.max_body import check_bodies
from qworker.message import Draft

__all__ = ["StoreRules"]


class StoreRules:
    """What the store of an app refuses.

    Args:
        backend: A backend of the store. It is not opened.
    """

    def __init__(self, backend: Backend) -> None:
        self._scheme = backend.describe().partition(":")[0]
        self._deviations = backend.deviations
        self._max_body = backend.max_body
        self._takes_id = getattr(backend, "takes_id", None)

    def check_later(self, draft: Draft, now: float) -> None:
        """Check a draft that is published later, when the caller cannot change it any more.

        Args:
            draft: The draft.
            now: Unix seconds.

        Raises:
            MessageTooLarge: Its body is larger than `max_body`.
            NotSupported: The store does not support one of its properties, or takes no ids.
        """
        reason = self._deviations.get("given_ids")
        if draft.id is None and reason is not None:
            raise NotSupported(
                f"{self._scheme}: does not support calls that are sent later, because it does not take their ids"
                f" ({reason}): enqueue after the block or the commit"
            )
        refuse_unsupported(self._scheme, self._deviations, [draft], takes_id=self._takes_id, now=now)
        check_bodies([draft], self._max_body)
