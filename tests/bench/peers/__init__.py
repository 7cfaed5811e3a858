"""What the bench compares with: installed into environments of their own, never into qworker's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["cache_directory", "environment", "python2"]


def cache_directory() -> Path:
    """Where the peers' environments are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qworker-bench"


def environment(name: str, requirements: list[str]) -> Path:
    """The Python of an environment that has `requirements`; made at the first call."""
    folder = cache_directory() / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(requirements)
    if not (python.exists() and stamp.exists() and stamp.read_text() == wanted):
        print(f"peers: installing {', '.join(requirements)} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *requirements], check=True
        )
        stamp.write_text(wanted)
    return python


def python2(requirement: str) -> tuple[str, dict[str, str]] | None:
    """A Python 2.7 and the environment in which it has `requirement`; None where there is none."""
    found = shutil.which("python2.7")
    if found is None or _fails(found, "-c", "pass"):
        # pyenv puts a stub on the path whether or not the version is selected.
        candidates = sorted(Path.home().glob(".pyenv/versions/2.7.*/bin/python2.7"))
        if not candidates:
            return None
        found = str(candidates[-1])
    folder = cache_directory() / "python2"
    if not (folder / "installed").exists():
        print(f"peers: installing {requirement} for Python 2.7 ...", flush=True)
        if _fails(found, "-m", "pip", "install", "-q", "--target", str(folder), requirement):
            return None
        (folder / "installed").write_text(requirement)
    return found, {**os.environ, "PYTHONPATH": str(folder)}


def _fails(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode != 0
