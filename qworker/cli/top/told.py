"""What the history tells from now on: how many messages were finished, and by whom."""

from __future__ import annotations

from collections import Counter, defaultdict

from qworker.backend import Backend

__all__ = ["Told"]

_PAGE = 1000


class Told:
    """Counts by queue, since the first look.

    Args:
        backend: one that keeps a history, or none: then nothing is told.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Where each part was left off; None: nobody has looked yet.
        self._ends: dict[str, str | None] | None = None
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        # By queue and worker: the time of the last look that has heard of it.
        self._heard: defaultdict[str, dict[str, float]] = defaultdict(dict)

    @property
    def on(self) -> bool:
        """Whether there is anything to count."""
        return self._backend.history.enabled

    async def look(self, now: float) -> None:
        """Take what is new.

        Args:
            now: monotonic seconds.
        """
        parts = await self._backend.history.logs()
        if self._ends is None:
            self._ends = {part: await self._backend.history.last_position(part) for part in parts}
            return
        for part in parts:
            # The log of a worker that has begun meanwhile is new from its beginning.
            after = self._ends.get(part)
            while True:
                page, after = await self._backend.history.read(part, after, _PAGE)
                self._ends[part] = after
                if not page:
                    break
                for event in page:
                    self._heard[event.queue][event.worker] = now
                    if event.kind == "acked":
                        self.done[event.queue] += 1
                    elif event.kind == "failed":
                        self.failed[event.queue] += 1

    def workers(self, queue: str, since: float) -> int:
        """How many workers have told of a queue since a look."""
        return sum(at >= since for at in self._heard[queue].values())
