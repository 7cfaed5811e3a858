"""The checks of `qworker doctor` for an `fsq:` URL."""

from __future__ import annotations

from qworker.kit.directory.doctor import examine_directory, try_link
from qworker.kit.doctor_check import Check
from qworker.url import BackendURL
from qworker_fsq.options import FsqOptions, parse_root

__all__ = ["check_directory"]


async def check_directory(url: BackendURL) -> list[Check]:
    """Check the directory, or FSQ_ROOT. Enqueueing needs hard links."""
    options = FsqOptions.from_url(url)
    return await examine_directory(parse_root(url, options.constants), [("link", try_link)], shared=options.shared)
