"""`memory:`: the reference model of a backend, in one process."""

from __future__ import annotations

from qworker_memory.backend import MemoryBackend

__all__ = ["MemoryBackend"]
