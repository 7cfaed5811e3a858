"""The reaper of the server: expired leases and due messages of all queues become ready again."""

from __future__ import annotations

import asyncio

import structlog

from qworker.backend import Backend
from qworker.backend.each_queue import describe_problem
from qworker.backend.reap_rounds import ReapRounds
from qworker.errors import BackendError
from qworker.log_events import QUEUE_UNUSABLE
from qworker.server.client_leases import ClientLeases

__all__ = ["ServerReaper"]

# Seconds.
_INTERVAL = 1.0

log = structlog.get_logger()


class ServerReaper:
    """Reaps all queues of a backend until it is cancelled.

    Args:
        backend: The backend.
        leases: The leases of the server's clients.
    """

    def __init__(self, backend: Backend, leases: ClientLeases) -> None:
        self._leases = leases
        self._rounds = ReapRounds(backend, backend.queues)
        # The queues whose trouble was logged.
        self._reported: set[str] = set()

    async def run(self) -> None:
        """Reap until cancelled."""
        while True:
            await self._round()
            self._leases.prune()
            await asyncio.sleep(_INTERVAL)

    async def _round(self) -> None:
        self._rounds.use(self._leases.queues_in_use())
        try:
            await self._rounds.run()
        except (BackendError, OSError) as error:
            log.warning("reap_failed", error=describe_problem(error))
            return
        failing = self._rounds.failing
        for queue in failing.keys() - self._reported:
            log.warning(QUEUE_UNUSABLE, queue=queue, error=describe_problem(failing[queue]))
        self._reported = set(failing)
