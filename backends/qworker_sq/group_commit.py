"""Rounds of syncs in a thread: a caller is covered by the first round that begins after it asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

__all__ = ["Rounds"]


class Rounds:
    """Group commit.

    Args:
        pool: where the work of a round runs.
        prepare: called on the loop when a round begins; gives its work.
        after: called on the loop after the work succeeded.
        failed: called on the loop after the work raised.
    """

    def __init__(
        self,
        pool: Executor,
        *,
        prepare: Callable[[], Callable[[], None]],
        after: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._prepare = prepare
        self._after = after
        self._failed = failed
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def commit(self) -> None:
        """Return when everything that was written before this call is synced.

        Raises:
            OSError: it is not known to be.
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
                error = await self._one()
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

    async def _one(self) -> OSError | None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare())
            self._after()
        except OSError as error:
            self._failed()
            return error
        return None

    async def finish(self) -> None:
        """Wait for the rounds that are under way."""
        while self._task is not None:
            await asyncio.wait([self._task])
