"""Two states of qworker beside each other: each installed from its own tree into an environment of its own.

An environment has everything that the bench's own has, but for what belongs to qworker; the entry points of an
installed qworker, by which backends are found, are those of its tree. So each code is driven by its own bench.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from harness.bench import child_environment

__all__ = ["CannotCompare", "Code", "code_at", "code_here", "commit_named", "last_problem"]

ROOT = Path(__file__).parents[3]
_BENCH = Path("tests", "bench")
# A tree whose bench has this file knows `--own`.
_MARK = _BENCH / "against.py"

_WHENCE = """
import importlib.metadata, importlib.util, json, qworker
found = {"qworker": qworker.__file__}
for distribution in importlib.metadata.distributions():
    for entry in distribution.entry_points:
        if entry.group.startswith("qworker."):
            spec = importlib.util.find_spec(entry.module)
            found[entry.module] = spec.origin if spec else "nowhere"
print(json.dumps(found))
"""


class CannotCompare(Exception):
    """One line: what is missing."""


@dataclass(frozen=True)
class Code:
    """One state of qworker that can be measured.

    Args:
        name: for the table.
        tree: its sources, with the bench that drives it.
        python: the interpreter that imports it and nothing else of qworker.
    """

    name: str
    tree: Path
    python: Path

    @property
    def run(self) -> Path:
        """The program of its bench."""
        return self.tree / _BENCH / "run.py"


def commit_named(commit: str) -> str:
    """The hash of a commit.

    Raises:
        CannotCompare: there is none of that name, or no git.
    """
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}", check=False).strip()
    if not found:
        raise CannotCompare(f"there is no commit {commit!r} in {ROOT}: `git log` lists those that there are")
    return found


def code_at(commit: str, folder: Path, *, this_bench: bool = False) -> Code:
    """The code of a commit.

    A commit whose bench cannot measure qworker's own side alone is driven by the first bench that can: that of the
    commit which brought it.

    Args:
        commit: its hash.
        folder: empty; takes the tree and the environment.
        this_bench: drive it by this tree's bench, for numbers that its own does not have.

    Raises:
        CannotCompare: it cannot be unpacked or installed.
    """
    tree = folder / "tree"
    tree.mkdir()
    _unpack(commit, tree)
    if this_bench or not (tree / _MARK).exists():
        shutil.rmtree(tree / _BENCH, ignore_errors=True)
        brought = _git("log", "--diff-filter=A", "--format=%H", "--", str(_MARK)).split()
        if brought and not this_bench:
            _unpack(brought[-1], tree, str(_BENCH))
        else:
            shutil.copytree(ROOT / _BENCH, tree / _BENCH)
    return _installed(_title(commit), tree, folder)


def code_here(folder: Path) -> Code:
    """The code of this tree as it is now, changes and new files included: it may be edited while it is measured.

    Args:
        folder: as of `code_at`.

    Raises:
        CannotCompare: it cannot be installed.
    """
    tree = folder / "tree"
    for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        source = ROOT / name
        if source.is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, tree / name)
    changed = len(_git("status", "--porcelain").splitlines())
    return _installed(f"{_title('HEAD')}{f', and {changed} changed files' if changed else ''}", tree, folder)


def _title(commit: str) -> str:
    return _git("log", "-1", "--format=%h (%s)", commit).strip()


def _git(*arguments: str, check: bool = True) -> str:
    # In a hook git names the repository of the hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except FileNotFoundError:
        raise CannotCompare("there is no git") from None
    if done.returncode and (check or done.stderr):
        raise CannotCompare(f"git {arguments[0]}: {last_problem(done.stderr)}")
    return done.stdout


def _unpack(commit: str, tree: Path, *paths: str) -> None:
    archive = tree / ".archive.tar"
    _git("archive", "--format=tar", f"--output={archive}", commit, *paths)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True)
    archive.unlink()


def _installed(name: str, tree: Path, folder: Path) -> Code:
    environment = folder / "environment"
    venv.EnvBuilder(symlinks=True).create(environment)
    base = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", base))
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", "--no-index"]
    # Its requirements are those that are here; what builds it as well.
    pip += ["--no-deps", "--no-build-isolation", "--target", str(packages), str(tree)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        raise CannotCompare(f"{name}: cannot be installed: {last_problem(done.stderr)}")
    _link_requirements(packages)
    code = Code(name, tree, environment / "bin" / "python")
    _check(code, packages)
    return code


def _link_requirements(packages: Path) -> None:
    """Copy the bench's own environment, without the parts of qworker and without links to other places."""
    skipped = _of_qworker() | {"__pycache__"}
    for folder in map(Path, sys.path):
        if folder.name not in {"site-packages", "dist-packages"} or not folder.is_dir():
            continue
        for source in folder.iterdir():
            link = packages / source.name
            if source.name not in skipped and source.suffix != ".pth" and not link.exists():
                link.symlink_to(source)


def _of_qworker() -> set[str]:
    """The names in `site-packages` of every distribution that brings something to qworker, and of itself."""
    return {
        file.parts[0]
        for distribution in importlib.metadata.distributions()
        if any(entry.group.startswith("qworker.") for entry in distribution.entry_points)
        for file in distribution.files or ()
    }


def _check(code: Code, packages: Path) -> None:
    """See that its interpreter imports its own qworker, and finds its own backends by their entry points."""
    done = subprocess.run(
        [str(code.python), "-c", _WHENCE],
        capture_output=True,
        text=True,
        check=False,
        cwd=packages.parent,
        env=child_environment(),
    )
    if done.returncode:
        raise CannotCompare(f"{code.name}: cannot be imported: {last_problem(done.stderr)}")
    for module, path in json.loads(done.stdout).items():
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(packages)):
            raise CannotCompare(f"{code.name}: {module} is found in {path}, which is not its own")


def last_problem(errors: str) -> str:
    """The line of a program's errors that names the first exception, or else its last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = (line for line in lines if line.partition(":")[0].replace(".", "").endswith(("Error", "Exception")))
    return next(named, lines[-1] if lines else "")
