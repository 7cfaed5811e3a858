"""What every figure needs: a disk to measure on, processes of their own, and a table."""

from __future__ import annotations

from harness.bench import Bench
from harness.report import Figure

__all__ = ["Bench", "Figure"]
