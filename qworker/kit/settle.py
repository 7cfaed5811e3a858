"""Batches of settlements in which some cannot be stored: they neither delay nor repeat the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from qworker.errors import BackendError
from qworker.message import Settlement

__all__ = ["SettledInPart", "Unstored", "settle_by_queue"]

# After this many errors in one batch the rest is not tried: each try can take long if the store itself has failed.
_MOST_ERRORS = 16


class SettledInPart(OSError):
    """Some settlements of a batch are not stored, and all others are, durably. It is the cause of a `BackendError`.

    A repetition of the whole batch is correct, too.

    Args:
        error: The first error.
        unstored: The settlements that are not stored.
        refused: The settlements that were refused.
    """

    def __init__(self, error: BaseException, unstored: Sequence[Settlement], refused: Sequence[Settlement]) -> None:
        number, text = (error.errno, error.strerror) if isinstance(error, OSError) else (None, str(error))
        super().__init__(number, text or str(error))
        self.unstored = tuple(unstored)
        self.refused = tuple(refused)


class Unstored:
    """The settlements of one batch that could not be stored, each because of its own file."""

    def __init__(self) -> None:
        self.settlements: list[Settlement] = []
        self._error: OSError | None = None
        self._errors = 0

    def add(self, settlement: Settlement, error: OSError | None = None) -> None:
        """Add a settlement. Without an error, it was not tried."""
        self.settlements.append(settlement)
        if error is not None:
            self._errors += 1
            self._error = self._error or error

    @property
    def has_enough(self) -> bool:
        """Whether the other settlements should not be tried."""
        return self._errors >= _MOST_ERRORS

    def raise_error(self, settlements: Sequence[Settlement], refused: Sequence[Settlement]) -> None:
        """Raise if a settlement of the batch is not stored. The caller has made all others durable.

        Raises:
            SettledInPart: Some are stored.
            OSError: None is stored.
        """
        if self._error is None:
            return
        if len(self.settlements) == len(settlements):
            raise self._error
        raise SettledInPart(self._error, self.settlements, refused) from self._error


async def settle_by_queue(
    settlements: Sequence[Settlement], settle: Callable[[str, Sequence[Settlement]], Awaitable[list[Settlement]]]
) -> list[Settlement]:
    """Settle the batch of each queue and return the refused settlements. One queue's error keeps no other from it.

    Raises:
        BackendError: Some settlements are not stored. If others are, a `SettledInPart` is the cause.
    """
    queues: dict[str, list[Settlement]] = {}
    for settlement in settlements:
        queues.setdefault(settlement.lease.message.queue, []).append(settlement)
    refused: list[Settlement] = []
    unstored: list[Settlement] = []
    first: BackendError | None = None
    for queue, some in queues.items():
        try:
            refused += await settle(queue, some)
        except BackendError as error:
            first = first or error
            part = error.__cause__
            refused += part.refused if isinstance(part, SettledInPart) else ()
            unstored += part.unstored if isinstance(part, SettledInPart) else some
    if first is None:
        return refused
    if len(unstored) == len(settlements) or len(queues) == 1:
        raise first
    raise type(first)(str(first)) from SettledInPart(first.__cause__ or first, unstored, refused)
