"""`fsq:///root[?...]`: queues of the fsq(7) standard, worked on in place, together with other implementations of it."""

from __future__ import annotations

from qworker_fsq.backend import FsqBackend

__all__ = ["FsqBackend"]
