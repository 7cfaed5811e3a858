"""The pages for users of other task queues: every block runs beside the real library, in one process for each page.

The libraries are installed apart from qworker, because they need another redis-py, and are ahead of it on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qworker import Tasks
from qworker.errors import UsageError
from tests.support.installed import installed
from tests.support.pages import ROOT, blocks, commands
from tests.support.processes import PYTHON
from tests.support.servers import RedisServer, free_port

# The libraries, and the versions that their pages name.
VERSIONS = {"arq": "0.28.0", "celery": "5.7.0", "dramatiq": "2.2.1", "huey": "3.5.4", "rq": "3.0.0"}
CLAIMS = ROOT / "tests" / "fixtures" / "coming_from"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


@pytest.fixture
def library(name: str) -> Path:
    """The folder of a library, with what it needs. arq needs a redis-py that the others refuse."""
    group = {"arq"} if name == "arq" else VERSIONS.keys() - {"arq"}
    extra = {"celery": "[redis]", "dramatiq": "[redis]", "huey": "[redis]"}
    requirements = sorted(f"{each}{extra.get(each, '')}=={VERSIONS[each]}" for each in group)

    def fetch(folder: Path) -> None:
        pip = [PYTHON, "-m", "pip", "install", "-qq", "--no-compile", "--target", str(folder)]
        subprocess.run([*pip, *requirements], check=True)

    return installed("peers", repr((requirements, sys.version)), fetch)


def test_each_library_has_a_page() -> None:
    assert VERSIONS.keys() == {path.stem for path in (ROOT / "docs" / "coming-from").glob("*.md")}


@pytest.mark.parametrize("name", VERSIONS)
def test_each_block_runs_beside_the_library_and_what_the_page_says_of_it_is_so(
    name: str, library: Path, server: RedisServer, tmp_path: Path
) -> None:
    page = f"docs/coming-from/{name}.md"
    assert f" {VERSIONS[name]}." in (ROOT / page).read_text()
    found = blocks(page)
    for block in found:
        if block.file is not None:
            with (tmp_path / block.file).open("a" if block.continues else "w") as file:
                file.write(block.text)
    shown = [command for block in found if block.language == "sh" for command in commands(block.text)]
    (tmp_path / "commands.json").write_text(json.dumps(shown))
    shutil.copy(CLAIMS / f"claims_{name}.py", tmp_path / "test_claims.py")
    shutil.copy(CLAIMS / "our_side.py", tmp_path)
    database = list(VERSIONS).index(name)
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(library), "REDIS_URL": f"redis://127.0.0.1:{server.port}/{database}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VERSIONS)
def test_each_word_of_the_table_exists(name: str, library: Path) -> None:
    table = (ROOT / "docs" / "coming-from" / f"{name}.md").read_text().split("\n## Words\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    theirs, ours = source(library / name), source(ROOT / "qworker")
    if name == "celery":
        theirs = theirs | source(library / "kombu")
    for left, right in rows:
        for side, known in ((left, theirs), (right, ours)):
            assert words(side) <= known | set(EXAMPLES.split()), side


@pytest.mark.parametrize("name", VERSIONS)
def test_the_error_that_a_page_shows_is_the_error_of_that_option(name: str) -> None:
    tasks = Tasks("memory://coming-from")
    page = " ".join((ROOT / "docs" / "coming-from" / f"{name}.md").read_text().split())
    ((text, call, option),) = re.findall(r"`((task|using)\(\) has no option '(\w+)'[^`]+)`", page)
    function: Callable[..., Any] = tasks.task if call == "task" else tasks.named("greet").using
    with pytest.raises(UsageError) as raised:
        function(**{option: 1})
    assert str(raised.value) == text


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("at_front", "did you mean priority= (0 to 9, and 9 is first)?"),
        ("max_age", "did you mean task.using(expires=...) (in seconds)?"),
        ("link_error", "did you mean on_failure= (another task)?"),
        ("depends_on", "enqueue the next task in the handler, or wait there for the job of another"),
        ("rate_limit", "raise Retry('rate limited', delay=1, counts=False) in the handler if your limiter refuses"),
    ],
)
def test_an_option_of_another_library_names_what_to_write(option: str, hint: str) -> None:
    task: Callable[..., Any] = Tasks("memory://coming-from").task
    with pytest.raises(UsageError) as raised:
        task(**{option: 1})
    assert str(raised.value) == f"task() has no option {option!r}: {hint}"


# Names of the examples in the tables.
EXAMPLES = "WorkerSettings ada ctx db fri greet hour job minute mon reason redis report tasks url"


@cache
def source(folder: Path) -> set[str]:
    """Every name in the code of a library."""
    return {name for path in folder.rglob("*.py") for name in re.findall(r"[^\W\d]\w*", path.read_text())}


def words(cell: str) -> set[str]:
    """The names in the code of a cell; in links too, but not where they lead."""
    return set(re.findall(r"[^\W\d]\w*", " ".join(re.findall(r"`([^`]+)`", cell))))
