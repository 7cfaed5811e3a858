"""What `qworker doctor fsq:...` tries: the file system is asked of as much as by `file:`."""

from __future__ import annotations

import msgspec

from qworker.doctor import Check
from qworker.url import BackendURL
from qworker_file import doctor as of_directories
from qworker_file.fsq.constants import Constants
from qworker_file.fsq.options import root_of

__all__ = ["doctor"]


async def doctor(url: BackendURL) -> list[Check]:
    """Try the directory of `url`, or FSQ_ROOT."""
    root = root_of(url, Constants.from_environment())
    return await of_directories.doctor(msgspec.structs.replace(url, authority="", path=str(root)))
