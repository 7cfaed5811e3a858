"""Open a source of scan items from a URL."""

from __future__ import annotations

from qworker.backend.offers import scan_of
from qworker.backend.scan_source import ScanOptions, ScanSource
from qworker.errors import NotSupported
from qworker.url import BackendURL

__all__ = ["open_source"]


def open_source(url: str, queue: str, options: ScanOptions) -> ScanSource:
    """Open the source of a queue's items.

    Raises:
        InvalidURL: The URL, its scheme or an option is not known.
        NotSupported: An option has no meaning for this backend.
        ScanError: The queue does not exist.
    """
    parsed = BackendURL.parse(url)
    own = scan_of(parsed.scheme)
    if own is not None:
        return own.open_scan(parsed, queue, options)
    if options.all_hosts or options.hosts:
        raise NotSupported(f"{parsed.scheme}: does not support sub-queues for hosts: use -a and -A with fsq:")
    if options.ignore_down or options.lock is False:
        raise NotSupported(f"{parsed.scheme}: does not support -i and -L: use them with fsq:")
    from qworker.tools.scan.leased import LeasedSource

    return LeasedSource(url, queue, options)
