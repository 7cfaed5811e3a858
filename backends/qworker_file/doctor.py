"""The checks of `qworker doctor` for a `file:` URL."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from qworker.kit.directory.body_sizes import examine_bodies
from qworker.kit.directory.doctor import examine_directory, find_blocked, try_exchange, try_fifo, try_link
from qworker.kit.doctor_check import Check, CheckStatus
from qworker.kit.store_errors import store_error
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.url import BackendURL
from qworker_file.cell_file import CELLS
from qworker_file.options import FileOptions

__all__ = ["check_directory"]


async def check_directory(url: BackendURL) -> list[Check]:
    """Check the directory. A given id needs hard links, a replaced call an exchange, and idle workers named pipes."""
    options = FileOptions.from_url(url)
    attempts = [("link", try_link), ("exchange", try_exchange), ("fifo", try_fifo)]
    checks = await examine_directory(url.directory, attempts, shared=options.shared)
    checks += await examine_bodies(url.directory, ("*/queue", "*/delay"), options.max_body)
    checks += await find_blocked(url.directory)
    return [*checks, *await run_in_thread(BlockingCall.CHECK, _find_unusable_cells, url.directory)]


def _find_unusable_cells(root: Path) -> list[Check]:
    """Report what is in the place of a directory of cells, and directories that this user cannot use."""
    try:
        places = [*root.glob(f"[!.]*/{CELLS}"), *root.glob(f"[!.]*/{CELLS}/[!.]*")]
        return [check for place in sorted(places) if (check := _check_cells(root, place)) is not None]
    except OSError as error:
        return [Check("cells", CheckStatus.WARN, f"unknown: {store_error(error, 'read the directories of cells')}")]


def _check_cells(root: Path, place: Path) -> Check | None:
    try:
        mode = os.stat(place, follow_symlinks=False).st_mode
    except FileNotFoundError:
        # A group was closed in the meantime.
        return None
    if not stat.S_ISDIR(mode):
        return Check("cells", CheckStatus.BROKEN, f"{place.relative_to(root)} is not a directory", "move it away")
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        fix = "let this user read it and write to it"
        return Check("cells", CheckStatus.BROKEN, f"{place.relative_to(root)} cannot be used", fix)
    return None
