"""`rfq:`: topics of the rfq protocol, shared live with any other implementation of it."""

from __future__ import annotations

from qworker_redis.rfq.backend import RfqBackend

__all__ = ["RfqBackend"]
