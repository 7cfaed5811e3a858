"""Changes of the source files, for `--reload`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import watchfiles

from qworker.url import working_directory

__all__ = ["wait_for_change", "watch_files"]

_DEBOUNCE_MS = 200
# watchfiles waits in a thread, and anyio does not cancel it. So the end of the process waits for this too.
_LONGEST_WAIT_MS = 200


async def watch_files() -> AsyncIterator[list[str]]:
    """Yield the Python files under the working directory that have changed, batch by batch."""
    here = working_directory()
    # trio, which is not installed, leaves a hole in its type.
    async for batch in watchfiles.awatch(  # pyright: ignore[reportUnknownMemberType]
        here,
        watch_filter=watchfiles.PythonFilter(),
        debounce=_DEBOUNCE_MS,
        rust_timeout=_LONGEST_WAIT_MS,
        ignore_permission_denied=True,
    ):
        yield _names(batch, here)


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
