"""`mq:` (a directory shared with mq servers) and `mq+http:` (a remote server)."""

from __future__ import annotations

from qworker_mq.backend import MqBackend

__all__ = ["MqBackend"]
