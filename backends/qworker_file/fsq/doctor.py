"""What `qworker doctor fsq:...` tries: enqueueing is a link."""

from __future__ import annotations

import os

from qworker.directory_doctor import examine_directory, try_link
from qworker.doctor import Check
from qworker.url import BackendURL
from qworker_file.fsq.constants import Constants
from qworker_file.fsq.options import root_of

__all__ = ["doctor"]


async def doctor(url: BackendURL) -> list[Check]:
    """Try the directory of `url`, or FSQ_ROOT."""
    root = root_of(url, Constants.from_environment())
    return await examine_directory(os.fspath(root), [("link", try_link)])
