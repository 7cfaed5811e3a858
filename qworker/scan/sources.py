"""From a URL to a source of work."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from qworker.errors import NotSupported
from qworker.scan.engine import ScanOptions, Source
from qworker.url import BackendURL

__all__ = ["GROUP", "open_source"]

GROUP = "qworker.scanners"

Opener = Callable[[BackendURL, str, ScanOptions], Source]


def open_source(url: str, queue: str, options: ScanOptions) -> Source:
    """The source of a queue's work.

    Raises:
        InvalidURL: the URL, its scheme or an option is not known.
        NotSupported: an option means nothing on this backend.
        ScanError: there is no such queue.
    """
    parsed = BackendURL.parse(url)
    for point in entry_points(group=GROUP, name=parsed.scheme):
        return cast("Opener", point.load())(parsed, queue, options)
    if options.all_hosts or options.hosts:
        raise NotSupported(f"{parsed.scheme}: has no sub-queues for hosts: -a and -A are for fsq:")
    if options.ignore_down or options.lock is False:
        raise NotSupported(
            f"{parsed.scheme}: gives no work without a lease, nor from a queue that is down: -i and -L are for fsq:"
        )
    from qworker.scan.leased import LeasedSource

    return LeasedSource(url, queue, options)
