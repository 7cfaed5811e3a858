"""The code of an earlier commit, to run beside that of today."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

__all__ = ["FIRST", "unpack_commit"]

ROOT = Path(__file__).parents[1]
# What it has written must stay readable, and its processes work beside those of today.
FIRST = "31528ec"


def unpack_commit(commit: str, folder: Path) -> dict[str, str]:
    """Unpack a commit's code; the environment in which this Python imports it, with its backends, and nothing of today's.

    Raises:
        AssertionError: it is not in this copy of the repository.
    """
    need = f"this test needs the code of commit {commit}, from git"
    assert shutil.which("git"), f"{need}: install git"
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    assert packed.returncode == 0, (
        f"{need}: run it in a clone of the repository with its whole history (git fetch --unshallow): "
        f"{packed.stderr.decode(errors='replace').strip()}"
    )
    subprocess.run(["tar", "-xf", "-", "-C", str(folder)], input=packed.stdout, check=True)
    then = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    now = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Found before the installed one, whichever of both names that has.
    for name in {then["name"], now["name"]}:
        _describe(folder / f"{name.replace('-', '_')}-{then['version']}.dist-info", name, then)
    return {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'backends'}"}


def _describe(info: Path, name: str, project: dict[str, dict[str, dict[str, str]]]) -> None:
    """Write what tells the interpreter of a distribution's entry points."""
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *[f"{point} = {target}" for point, target in points.items()]]
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
