"""Group commit of a channel: syncs in a thread. The first round that begins after a call covers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

__all__ = ["ChannelCommit"]


class ChannelCommit:
    """Rounds of syncs, one after another.

    Args:
        pool: The threads that do the work of a round.
        prepare: Called on the loop when a round begins; returns its work.
        on_success: Called on the loop after the work succeeded.
        on_failure: Called on the loop after the work raised.
    """

    def __init__(
        self,
        pool: Executor,
        *,
        prepare: Callable[[], Callable[[], None]],
        on_success: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._prepare = prepare
        self._on_success = on_success
        self._on_failure = on_failure
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def commit(self) -> None:
        """Return when everything that was written before this call is synced.

        Raises:
            OSError: It is unknown whether it is synced.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="sq-commit")
        await done

    async def _run(self) -> None:
        try:
            while self._waiting:
                round_, self._waiting = self._waiting, []
                error = await self._run_round()
                for done in round_:
                    if done.done():
                        continue
                    if error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(error)
        finally:
            self._task = None
            for done in self._waiting:
                done.cancel()

    async def _run_round(self) -> OSError | None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare())
            self._on_success()
        except OSError as error:
            self._on_failure()
            return error
        return None

    async def finish(self) -> None:
        """Wait for the rounds that are in progress."""
        while self._task is not None:
            await asyncio.wait([self._task])
