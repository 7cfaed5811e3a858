"""The checks of `qworker doctor` for an `fsq:` URL."""

from __future__ import annotations

from qworker.kit.directory.body_sizes import examine_bodies
from qworker.kit.directory.doctor import examine_directory, find_blocked, try_link
from qworker.kit.doctor_check import Check
from qworker.url import BackendURL
from qworker_fsq.options import FsqOptions, parse_root

__all__ = ["check_directory"]


async def check_directory(url: BackendURL) -> list[Check]:
    """Check the directory, or FSQ_ROOT. Enqueueing needs hard links."""
    options = FsqOptions.from_url(url)
    root = parse_root(url, options.constants)
    checks = await examine_directory(root, [("link", try_link)], shared=options.shared)
    host = "" if options.host is None else f"{options.constants.hosts}/{options.host}/"
    checks += await examine_bodies(root, (f"*/{host}{options.constants.queue}",), options.max_body)
    return [*checks, *await find_blocked(root)]
