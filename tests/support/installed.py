"""Programs of other projects for tests, which are installed once per machine for all test processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

__all__ = ["environment", "installed"]


def installed(name: str, made_of: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills; made again when `made_of` changes, or when it was not finished."""
    cache = _cache()
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / "complete").touch()
    return folder


def environment(name: str, made_of: str, fill: Callable[[Path], None]) -> Path:
    """The Python of a virtual environment that `fill` installs into."""

    def make(folder: Path) -> None:
        venv.create(folder, with_pip=True)
        fill(folder / "bin" / "python")

    return installed(name, made_of, make) / "bin" / "python"


def _cache() -> Path:
    named = os.environ.get("XDG_CACHE_HOME")
    return Path(named) / "qworker-tests" if named else Path(tempfile.gettempdir()) / f"qworker-tests-{os.getuid()}"
