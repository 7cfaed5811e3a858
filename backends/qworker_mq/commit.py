"""Group commit: what is pending is made durable together, one round at a time.

A round covers only what was done before it was submitted. A file whose sync failed is never synced again: its publish has failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

__all__ = ["Committer"]

# From this many descriptors on, one syncfs costs less than a sync of each. A thread that makes many calls also waits many times for
# the interpreter's lock beside a busy loop.
_MANY = 8


@cache
def _syncfs() -> Callable[[int], int] | None:
    """The C function, of a descriptor; None where it is absent, or hides write errors (before Linux 5.8)."""
    release = platform.release().split(".")
    version = tuple(int(part) if part.isdigit() else 0 for part in release[:2])
    libc = ctypes.CDLL(None, use_errno=True)
    if platform.system() != "Linux" or version < (5, 8) or not hasattr(libc, "syncfs"):
        return None
    function = libc.syncfs
    function.argtypes = [ctypes.c_int]
    return lambda descriptor: int(function(descriptor))


class Committer:
    """Makes files and directories durable.

    Args:
        root: a descriptor on the same file system.
        enabled: False: nothing is synced, and every call returns at once.
    """

    def __init__(self, root: int, *, enabled: bool) -> None:
        self._root = root
        self._enabled = enabled
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[tuple[tuple[int, ...], asyncio.Future[dict[int, OSError]]]] = []
        self._rounds: asyncio.Task[None] | None = None

    async def sync(self, descriptors: Sequence[int]) -> dict[int, OSError]:
        """Sync files or directories; the ones that failed, with their errors. They stay open until this returns.

        A cancelled call leaves the descriptors in use for a while: shield it.
        """
        if not self._enabled or not descriptors:
            return {}
        future: asyncio.Future[dict[int, OSError]] = asyncio.get_running_loop().create_future()
        self._pending.append((tuple(descriptors), future))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="qworker-mq-sync")
        while self._pending:
            # One turn of the loop gathers what its other callers submit in it.
            await asyncio.sleep(0)
            batch, self._pending = self._pending, []
            wanted = dict.fromkeys(fd for descriptors, _ in batch for fd in descriptors)
            failed = await loop.run_in_executor(self._thread, self._sync_all, list(wanted))
            for descriptors, future in batch:
                if not future.done():
                    future.set_result({fd: failed[fd] for fd in descriptors if fd in failed})

    def _sync_all(self, descriptors: list[int]) -> dict[int, OSError]:
        syncfs = _syncfs()
        if len(descriptors) >= _MANY and syncfs is not None:
            if syncfs(self._root) == 0:
                return {}
            number = ctypes.get_errno()
            return dict.fromkeys(descriptors, OSError(number, os.strerror(number)))
        return _sync_each(descriptors)

    async def aclose(self) -> None:
        """Finish what is pending."""
        if self._rounds is not None:
            await self._rounds
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None


def _sync_each(descriptors: Iterable[int]) -> dict[int, OSError]:
    failed: dict[int, OSError] = {}
    for fd in descriptors:
        try:
            os.fsync(fd)
        except OSError as error:
            failed[fd] = error
    return failed
