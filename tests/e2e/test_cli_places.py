"""How the command line finds an app: wrong MODULE:ATTRIBUTE, names of other modules, a deleted working directory."""

from __future__ import annotations

import importlib.util
import logging
import queue
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.cli.main import main
from tests.support.processes import environment
from tests.support.waiting import PATIENCE

# The folders of the interpreter's own modules, which a script finds after its own folder, and qworker before it.
HERE = "file://./spool"
APP = """
from qworker import Tasks
tasks = Tasks("file://./spool")

@tasks.task
async def late() -> None:
    import helper
    print(helper.TEXT, flush=True)

@tasks.task
def threaded() -> None:
    print("threaded", flush=True)

@tasks.task(process=True)
def processed() -> None:
    print("processed", flush=True)
"""


def qworker(folder: Path, *arguments: str, **env: str) -> tuple[int, str, str]:
    # As the script `qworker` does, and not `python -m`: that puts the working directory before everything else.
    start = "import sys; from qworker.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, *arguments],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def one_line(err: str) -> str:
    assert err.startswith("qworker: ")
    assert err.count("\n") == 1
    return err


# -- names that are taken ----------------------------------------------------------------------------------------------


def test_files_that_are_named_like_the_standard_librarys_harm_no_worker(tmp_path: Path) -> None:
    for name in filter(importlib.util.find_spec, sys.stdlib_module_names):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} of the app')\n")
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "helper.py").write_text("TEXT = 'from beside the app'\n")
    for task in ("late", "threaded", "processed"):
        status, _, err = qworker(tmp_path, "enqueue", "app:tasks", task)
        assert status == 0, err
    status, out, err = qworker(tmp_path, "run", "app:tasks", "--burst", "--health", "127.0.0.1:0")
    assert status == 0, err
    assert sorted(out.split("\n")) == ["", "from beside the app", "processed", "threaded"], err
    assert "of the app" not in err


@pytest.mark.parametrize(("name", "taken"), [("logging", logging), ("queue", queue), ("click", None)])
def test_an_app_whose_name_is_taken_is_one_line_with_both_files(name: str, taken: object, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(APP)
    status, _, err = qworker(tmp_path, "run", f"{name}:tasks")
    assert status == 2
    line = one_line(err)
    assert getattr(taken, "__file__", "click/__init__.py") in line
    assert f"it is not {tmp_path / name}.py: rename your module" in line


def test_an_app_may_have_a_name_of_the_standard_library_that_nobody_needs(tmp_path: Path) -> None:
    (tmp_path / "cmd.py").write_text(APP)
    (tmp_path / "helper.py").write_text("TEXT = 'from beside the app'\n")
    assert qworker(tmp_path, "enqueue", "cmd:tasks", "late")[0] == 0
    status, out, _ = qworker(tmp_path, "run", "cmd:tasks", "--burst")
    assert (status, out) == (0, "from beside the app\n")


# -- how a place is written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "write"),
    [
        ("./app.py:tasks", "write app:tasks: the name of a module"),
        ("app.py:tasks", "write app:tasks: the name of a module"),
        ("app.py", "write app:tasks: the name of a module"),
        ("path/to/app.py:work", "write path.to.app:work, or run qworker in path/to with app:work"),
        ("path/to/app:work", "write path.to.app:work, or run qworker in path/to with app:work"),
        ("/srv/app/app.py:tasks", "run qworker in /srv/app with app:tasks"),
        ("../app.py:tasks", "run qworker in .. with app:tasks"),
        ("app", "such as app:tasks for `tasks = Tasks(...)` in app.py"),
        ("package.app:", "such as package.app:tasks for"),
        (":tasks", "such as app:tasks for"),
        ("", "such as app:tasks for"),
        ("app:tasks:more", "such as app:tasks for"),
        ("app:my tasks", "such as app:tasks for"),
        ("my-app:tasks", "such as app:tasks for"),
    ],
)
def test_a_place_that_is_none_is_one_line_with_what_to_write(
    place: str, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", place]) == 2
    line = one_line(capsys.readouterr().err)
    assert repr(place) in line
    assert write in line


# -- a working directory that is gone ----------------------------------------------------------------------------------


def in_no_folder(folder: Path, line: str) -> tuple[int, str]:
    """Run a line of the shell, in which Q is qworker, in a folder that does not exist any more."""
    (folder / "gone").mkdir()
    Q = f'{sys.executable} -P -c "import sys; from qworker.cli.main import main; sys.exit(main())"'  # noqa: N806
    done = subprocess.run(
        ["bash", "-c", f"cd {folder}/gone && rmdir ../gone && {Q} {line}"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "publish URL inbox --body x",
        "create URL inbox",
        "stats URL",
        "ls URL",
        "history URL",
        "doctor URL",
        "bench URL --messages 10",
        "scan URL inbox cat",
        "run qworker.cli.demo_app:tasks --burst --url URL",
        "run qworker.cli.demo_app:tasks --burst -w 2 --url URL",
    ],
)
def test_a_whole_path_needs_no_working_directory(line: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool"
    main(["create", url, "inbox"])
    status, told = in_no_folder(tmp_path, line.replace("URL", url))
    assert status == 0, told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "line",
    [
        "stats file://./spool",
        "publish fsq:spool inbox --body x",
        "run app:tasks",
        "run app:tasks --reload",
        "enqueue app:tasks late",
        "move file:///tmp file://./spool",
    ],
)
def test_what_needs_the_working_directory_says_so_in_one_line(line: str, tmp_path: Path) -> None:
    status, told = in_no_folder(tmp_path, line)
    assert status == 2, told
    assert "the working directory was deleted" in one_line(told)
