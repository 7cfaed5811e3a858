"""`file:`: queues in a directory."""

from __future__ import annotations

from qworker_file.backend import FileBackend

__all__ = ["FileBackend"]
