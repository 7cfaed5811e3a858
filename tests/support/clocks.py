"""Processes whose wall clock is wrong."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

__all__ = ["moved_clock"]


def moved_clock(folder: Path, seconds: float) -> dict[str, str]:
    """Return the variables of a process whose wall clock differs from the machine's clock by `seconds`."""
    library = folder / "moved_clock.so"
    if not library.exists():
        source = Path(__file__).with_name("moved_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    clock = folder / f"clock{seconds:+.0f}"
    clock.write_bytes(struct.pack("=qq", int(seconds * 1e6), 0))
    return {"LD_PRELOAD": str(library), "QWORKER_TEST_CLOCK": str(clock)}
