"""What the kernel tells of a running process."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["cpu_seconds", "memory_mb"]

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int, *, children: bool = False) -> float:
    """Seconds of CPU that a process has taken; with those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / _TICKS


def memory_mb(pid: int, *, peak: bool = False) -> float:
    """The resident memory of a process in MB, or the most that it has had."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / 1e6 if found else float("nan")
