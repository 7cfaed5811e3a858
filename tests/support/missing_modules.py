"""Programs in an interpreter in which some modules are not installed."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["output_without"]


def output_without(modules: tuple[str, ...], program: str) -> str:
    """Return the standard output of a Python program that cannot import some modules, and must succeed."""
    missing = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    command = [sys.executable, "-c", missing + program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
