"""Changes of the source files, for `--reload`."""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio
import watchfiles

from qworker.kit.task_groups import background_tasks
from qworker.url import working_directory

__all__ = ["wait_for_change", "watch_files"]

_DEBOUNCE_MS = 200


async def watch_files(changed: Callable[[list[str]], None]) -> None:
    """Call `changed` with the Python files under the working directory that have changed, until cancelled."""
    stop = anyio.Event()

    async def stop_with_the_block() -> None:
        # watchfiles waits for its thread, which anyio does not cancel. It returns for this event, or after 5 s.
        try:
            await anyio.sleep_forever()
        finally:
            stop.set()

    async with background_tasks(stop_with_the_block):
        await _watch(changed, stop)


async def _watch(changed: Callable[[list[str]], None], stop: anyio.Event) -> None:
    here = working_directory()
    # trio, which is not installed, leaves a hole in its type.
    async for batch in watchfiles.awatch(  # pyright: ignore[reportUnknownMemberType]
        here,
        watch_filter=watchfiles.PythonFilter(),
        debounce=_DEBOUNCE_MS,
        stop_event=stop,
        ignore_permission_denied=True,
    ):
        changed(_names(batch, here))


def wait_for_change() -> list[str]:
    """Block until a Python file under the working directory changes.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    here = working_directory()
    for batch in watchfiles.watch(
        here,
        watch_filter=watchfiles.PythonFilter(),
        debounce=_DEBOUNCE_MS,
        ignore_permission_denied=True,
        raise_interrupt=True,
    ):
        return _names(batch, here)
    return []


def _names(batch: set[tuple[watchfiles.Change, str]], here: str) -> list[str]:
    return sorted(os.path.relpath(path, here) for _, path in batch)
