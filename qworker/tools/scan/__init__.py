"""Run any program as a handler: it runs once for each message, and its exit status decides how the message is settled.

`engine` runs programs over a `ScanSource`. `leased` makes a source of any backend. A protocol with its own way of
taking work provides another source by `open_scan` on its backend class (qworker/backend/offers.py).
"""

from __future__ import annotations

from qworker.tools.scan.engine import scan
from qworker.tools.scan.sources import open_source

__all__ = ["open_source", "scan"]
