"""Count finished messages and their workers, from the events that the history gets from now on."""

from __future__ import annotations

from collections import Counter, defaultdict

from qworker.backend import Backend

__all__ = ["HistoryRates"]

_PAGE = 1000


class HistoryRates:
    """Counts for each queue, since the first sample.

    Args:
        backend: A backend. If it keeps no history, nothing is counted.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # The position in each log. None before the first sample.
        self._ends: dict[str, str | None] | None = None
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        # By queue and worker: the time of the last sample that found one of its events.
        self._heard: defaultdict[str, dict[str, float]] = defaultdict(dict)

    @property
    def on(self) -> bool:
        """Whether the backend keeps a history."""
        return self._backend.history.enabled

    async def sample(self, now: float) -> None:
        """Count the new events.

        Args:
            now: Monotonic seconds.
        """
        logs = await self._backend.history.logs()
        if self._ends is None:
            self._ends = {log: await self._backend.history.last_position(log) for log in logs}
            return
        for log in logs:
            # The log of a new worker is read from its beginning.
            after = self._ends.get(log)
            while True:
                batches, after = await self._backend.history.read_batches(log, after, _PAGE)
                self._ends[log] = after
                if not batches:
                    break
                for batch in batches:
                    self._heard[batch.queue][batch.worker] = now
                    if batch.kind == "acked":
                        self.done[batch.queue] += len(batch.id)
                    elif batch.kind == "failed":
                        self.failed[batch.queue] += len(batch.id)

    def workers(self, queue: str, since: float) -> int:
        """Return how many workers have recorded events of a queue since a time."""
        return sum(at >= since for at in self._heard[queue].values())
