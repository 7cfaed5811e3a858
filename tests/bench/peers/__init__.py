"""What the bench compares with: installed into environments of their own, never into qworker's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["cache_directory", "environment", "fsq"]

_ROOT = Path(__file__).parents[3]


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


@functools.cache
def fsq() -> tuple[str, dict[str, str]]:
    """A Python and the environment in which it has fsq 0.2.5: Python 2.7, for which it was made, where there is one."""
    sys.path.insert(0, str(_ROOT))
    from tests.support.fsq_release import install_fsq, interpreters

    python, folder = install_fsq(interpreters()[-1])
    return python, {**os.environ, "PYTHONPATH": str(folder)}
