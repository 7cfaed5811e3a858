"""The contract of backends, and how a URL becomes a backend."""

from __future__ import annotations

from qworker.backend.contract import Backend, RemoteLeases

__all__ = ["Backend", "RemoteLeases"]
