"""The checks of `qworker doctor` for a `file:` URL."""

from __future__ import annotations

from qworker.kit.directory.body_sizes import examine_bodies
from qworker.kit.directory.doctor import examine_directory, find_blocked, try_fifo, try_link
from qworker.kit.doctor_check import Check
from qworker.url import BackendURL
from qworker_file.options import FileOptions

__all__ = ["check_directory"]


async def check_directory(url: BackendURL) -> list[Check]:
    """Check the directory. A given id needs hard links, and waking idle workers needs named pipes."""
    options = FileOptions.from_url(url)
    attempts = [("link", try_link), ("fifo", try_fifo)]
    checks = await examine_directory(url.directory, attempts, shared=options.shared)
    checks += await examine_bodies(url.directory, ("*/queue", "*/delay"), options.max_body)
    return [*checks, *await find_blocked(url.directory)]
