"""A journaled ext4 to measure files on: a sparse image, loop-mounted while the bench runs, where that may be done.

An ext4 without a journal makes files 10 to 60 times slower after deletions, and erratically so; what is under a build
machine's root is anybody's guess.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["measuring_disk"]

_SIZE = "12G"
_INODES = "3200000"


@contextmanager
def measuring_disk(base: Path | None) -> Iterator[tuple[Path, str]]:
    """A folder to measure in, and what is known of its file system.

    Args:
        base: measure in this folder as it is; None: on an image, or, where none can be mounted, in the temporary
            folder.
    """
    if base is not None:
        with tempfile.TemporaryDirectory(prefix="qworker-bench-", dir=base) as folder:
            yield Path(folder), file_system(Path(folder))
        return
    with tempfile.TemporaryDirectory(prefix="qworker-bench-") as scratch:
        problem = _cannot_mount()
        if problem is None:
            image, mounted = Path(scratch, "image"), Path(scratch, "mounted")
            problem = _make(image, mounted)
            if problem is None:
                try:
                    yield mounted, "ext4 with a journal, in a loop image"
                finally:
                    _run("umount", str(mounted), tries=20)
                return
        print(f"disk: no journaled image ({problem}): measuring in {scratch}, {file_system(Path(scratch))}")
        yield Path(scratch), file_system(Path(scratch))


def _cannot_mount() -> str | None:
    if os.geteuid() != 0:
        return "only root may mount"
    missing = [tool for tool in ("mkfs.ext4", "mount", "umount") if shutil.which(tool, path=_path()) is None]
    return f"no {missing[0]}" if missing else None


def _make(image: Path, mounted: Path) -> str | None:
    mounted.mkdir()
    _run("truncate", "-s", _SIZE, str(image))
    # All tables now: written lazily, they would be written while something is measured.
    lazy = "lazy_itable_init=0,lazy_journal_init=0"
    made = _run("mkfs.ext4", "-q", "-F", "-N", _INODES, "-J", "size=128", "-E", lazy, str(image), check=False)
    if made:
        return made
    return _run("mount", "-o", "loop,noatime", str(image), str(mounted), check=False)


def _run(*command: str, check: bool = True, tries: int = 1) -> str | None:
    """None, or what the command complained of."""
    problem: str | None = None
    for attempt in range(tries):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()})
        if done.returncode == 0:
            return None
        problem = f"{command[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}"
        if attempt + 1 < tries:
            subprocess.run(["sleep", "0.25"], check=True)
    if check:
        raise RuntimeError(problem)
    return problem


def _path() -> str:
    # mkfs lives where a user's PATH does not look.
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, and whether it has a journal, as far as the kernel tells."""
    device = folder.stat().st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            kind, source = after.split()[:2]
            options = Path("/proc/fs") / kind / Path(source).name / "options"
            if kind == "ext4" and options.exists() and "data=" not in options.read_text():
                return "ext4 WITHOUT a journal: figures of files are erratic"
            return kind
    return "an unknown file system"
