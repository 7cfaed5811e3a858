"""qworker in one executable file, whose beginning says where the modules are: no other process knows."""

from __future__ import annotations

import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from tests.support.processes import environment
from tests.support.waiting import PATIENCE

# What shiv and pex do: the packages come from where the file has put them.
BEGINNING = """
import sys
sys.path[1:1] = {path!r}
from qworker.cli.main import main
sys.exit(main())
"""

APP = """
from qworker import Tasks
tasks = Tasks("file://./spool")

@tasks.task
async def hello() -> None:
    print("hello", flush=True)
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zipapp")
    (folder / "source").mkdir()
    path = [place for place in sys.path if place]
    (folder / "source" / "__main__.py").write_text(BEGINNING.format(path=path))
    zipapp.create_archive(folder / "source", folder / "qworker.pyz")
    return folder / "qworker.pyz"


def run(archive: Path, folder: Path, *arguments: str) -> str:
    """What it prints; by the interpreter of the system, which has no qworker."""
    base = getattr(sys, "_base_executable", sys.executable)
    command = [os.path.realpath(base), "-I", str(archive), *arguments]
    told = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert told.returncode == 0, told.stdout
    return told.stdout


def test_the_demo_runs_inside_one_file(archive: Path, tmp_path: Path) -> None:
    assert "All as promised." in run(archive, tmp_path, "demo")


def test_worker_processes_and_their_replacements_run_inside_one_file(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    for _ in range(3):
        run(archive, tmp_path, "enqueue", "app:tasks", "hello")
    told = run(archive, tmp_path, "run", "app:tasks", "-w", "2", "--burst", "--max-messages", "1")
    assert told.count("hello\n") == 3
