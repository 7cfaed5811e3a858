"""A watcher: a function that observes a process, its files or its queues until it is cancelled."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["run_watcher"]


async def run_watcher(watcher: Callable[[], Coroutine[Any, Any, Any]], log: Any) -> None:
    """Run a watcher. If it fails, log the error: it must not end the process that it watches."""
    try:
        await watcher()
    except Exception as error:  # noqa: BLE001 - logged for each watcher
        log.error("watcher_failed", error=repr(error))  # noqa: TRY400 - a line for each watcher, no traceback
