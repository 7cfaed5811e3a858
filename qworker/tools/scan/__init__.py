"""Any program as a handler: it runs once for each message, and its exit status decides what becomes of it.

`engine` runs programs over a `Source` of work; `leased` makes one of any backend. A protocol with its own ways of taking work brings
another by `open_scan` on its backend class (qworker/backend/offers.py).
"""

from __future__ import annotations

from qworker.tools.scan.engine import scan
from qworker.tools.scan.sources import open_source

__all__ = ["open_source", "scan"]
