"""Any program as a handler: it runs once for each message, and its exit status decides what becomes of it.

`engine` runs programs over a `Source` of work; `leased` makes one of any backend. A protocol with its own ways of taking work brings
another by an entry point in the group `qworker.scanners`, keyed by URL scheme: a callable that takes the `BackendURL`, the queue and the
`ScanOptions`, and returns a `Source`.
"""

from __future__ import annotations

from qworker.scan.engine import Ended, Exits, ScanDown, ScanError, ScanOptions, Source, Work, scan
from qworker.scan.sources import GROUP, open_source

__all__ = [
    "GROUP",
    "Ended",
    "Exits",
    "ScanDown",
    "ScanError",
    "ScanOptions",
    "Source",
    "Work",
    "open_source",
    "scan",
]
