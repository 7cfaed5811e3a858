"""What `qworker doctor file:...` tries: a given id is a second link, and a pipe wakes idle workers."""

from __future__ import annotations

import os

from qworker.directory_doctor import examine_directory, try_fifo, try_link
from qworker.doctor import Check
from qworker.url import BackendURL

__all__ = ["doctor"]


async def doctor(url: BackendURL) -> list[Check]:
    """Try the directory of `url`."""
    return await examine_directory(os.fspath(url.directory), [("link", try_link), ("fifo", try_fifo)])
