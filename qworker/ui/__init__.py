"""The dashboard: pages about the queues of one store, as an ASGI application.

`qworker ui URL` serves it. Its numbers come from a sampler, and lists are read with a budget, so that no request counts
or scans a queue.
"""

from __future__ import annotations

from qworker.ui.access import Access, Role
from qworker.ui.app import Dashboard

__all__ = ["Access", "Dashboard", "Role"]
