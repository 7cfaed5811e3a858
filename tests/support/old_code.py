"""The code of an earlier commit, to run beside that of today."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

__all__ = ["FIRST", "files_of_commit", "unpack_commit"]

ROOT = Path(__file__).parents[2]
# What it has written must stay readable, and its processes work beside those of today.
FIRST = "31528ec"


def unpack_commit(commit: str, folder: Path) -> dict[str, str]:
    """Unpack a commit's code. Return the environment in which this Python imports it and its backends.

    Raises:
        AssertionError: it is not in this copy of the repository.
    """
    subprocess.run(["tar", "-xf", "-", "-C", str(folder)], input=_git(commit, "archive", commit), check=True)
    then = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    now = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Later commits have their version in the package. Entry points need any.
    then.setdefault("version", "0")
    # Found before the installed one, whichever of both names that has.
    for name in {then["name"], now["name"]}:
        _describe(folder / f"{name.replace('-', '_')}-{then['version']}.dist-info", name, then)
    return {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'backends'}"}


def files_of_commit(commit: str, path: str) -> dict[str, str]:
    """The texts of a folder's files in a commit, by name.

    Raises:
        AssertionError: the commit is not in this copy of the repository.
    """
    with tarfile.open(fileobj=io.BytesIO(_git(commit, "archive", commit, path))) as packed:
        found = [(Path(one.name).name, packed.extractfile(one)) for one in packed if one.isfile()]
        return {name: file.read().decode() for name, file in found if file is not None}


def _git(commit: str, *arguments: str) -> bytes:
    """What git says of a commit."""
    need = f"this test needs the code of commit {commit}, from git"
    assert shutil.which("git"), f"{need}: install git"
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    assert ran.returncode == 0, (
        f"{need}: run it in a clone of the repository with its whole history (git fetch --unshallow): "
        f"{ran.stderr.decode(errors='replace').strip()}"
    )
    return ran.stdout


def _describe(info: Path, name: str, project: dict[str, dict[str, dict[str, str]]]) -> None:
    """Write what tells the interpreter of a distribution's entry points."""
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *[f"{point} = {target}" for point, target in points.items()]]
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
