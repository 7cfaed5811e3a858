"""The leases that one backend instance holds, for `reap`, which checks whether they are still there.

A lease that was dropped or settled must cost nothing: the list has weak references, and a settlement sets a flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from qworker.message import Lease

__all__ = ["OwnLeases", "RedisLease"]

# References in a list before those of leases that have ended are dropped.
_MOST = 2048

# The key and the sequence number under which the server may keep the answer to a settlement, and the settlement's
# number in that batch.
LostAnswer = tuple[str, str, int]


class RedisLease(Lease, kw_only=True, eq=False, weakref=True):
    """A lease and its claim: the token and the claimant, which the scripts compare."""

    claim: bytes
    # Set when the answer to its settlement was lost.
    lost_answer: LostAnswer | None = None
    # Whether a settlement was sent, or its loss was reported.
    ended: bool = False


class OwnLeases:
    """The leases of one backend by queue."""

    def __init__(self) -> None:
        self._refs: dict[str, list[ref[Lease]]] = {}
        self._most: dict[str, int] = {}

    def add(self, queue: str, leases: Sequence[Lease]) -> None:
        """Add leases that were taken."""
        refs = self._refs.setdefault(queue, [])
        refs += map(ref, leases)
        if len(refs) > self._most.get(queue, _MOST):
            # So the list is never more than twice as long as the number of leases that are held.
            self._most[queue] = max(_MOST, 2 * len(self.held(queue)))

    def held(self, queue: str) -> list[RedisLease]:
        """Return the leases that are held as far as this instance knows."""
        refs = self._refs.get(queue)
        if not refs:
            return []
        held = [lease for each in refs if isinstance(lease := each(), RedisLease) and not lease.ended]
        if held:
            self._refs[queue] = [ref(lease) for lease in held]
        else:
            del self._refs[queue]
        return held
