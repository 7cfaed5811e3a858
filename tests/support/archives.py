"""Unpacking what tests need."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["unpack"]


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar.gz, with its modes and FIFOs.

    By tar: extractall has its safe filter only from Python 3.11.4 on, and warns without one from 3.12 on.
    """
    subprocess.run(["tar", "-xpzf", str(archive), "-C", str(folder)], check=True, timeout=60)
