"""A fresh process replaces a worker after --max-messages, above --max-memory, or when --reload sees a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from qworker.kit.linux import resident_mb
from qworker.supervisor.source_watcher import watch_files
from qworker.worker import WorkerCounts

__all__ = ["has_reached", "watch_memory", "watch_sources"]

_MEMORY_EVERY_S = 1.0


def has_reached(max_messages: int | None, counts: WorkerCounts) -> bool:
    """Return whether a worker has run as many messages as it may."""
    return max_messages is not None and counts.leased - counts.released >= max_messages


async def watch_memory(limit_mb: float, recycle: Callable[[str], None]) -> None:
    """Wait until this process uses more than `limit_mb` MB, then call `recycle` with the reason."""
    # Not at once: if a fresh process already exceeds the limit, it still does some work before its replacement.
    await asyncio.sleep(_MEMORY_EVERY_S)
    while (used := resident_mb()) <= limit_mb:
        await asyncio.sleep(_MEMORY_EVERY_S)
    recycle(f"{used:.0f} MB of memory are more than {limit_mb:g}")


async def watch_sources(recycle: Callable[[str], None]) -> None:
    """Call `recycle` with the reason whenever source files change."""
    async for names in watch_files():
        recycle(f"changed: {', '.join(names[:3])}")
