"""The checks of `qworker doctor` for a `file:` URL."""

from __future__ import annotations

from qworker.kit.directory.doctor import examine_directory, try_fifo, try_link
from qworker.kit.doctor_check import Check
from qworker.kit.file_system import shared_option
from qworker.url import BackendURL

__all__ = ["check_directory"]


async def check_directory(url: BackendURL) -> list[Check]:
    """Check the directory. A given id needs hard links, and waking idle workers needs named pipes."""
    shared = shared_option(url)
    return await examine_directory(url.directory, [("link", try_link), ("fifo", try_fifo)], shared=shared)
