"""What programs read from `qworker pipeline` stays as it is, until a commit says otherwise."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.golden_text import Normal, check, json_of_command
from tests.support.processes import PYTHON, environment
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

URL = "file://./spool?keep_done=all&history=1&sync=off"
APP = """
from qworker import Fail, Tasks
tasks = Tasks("file://./spool?keep_done=all&history=1&sync=off")

@tasks.task(queue="pictures")
async def thumbnail(path: str, width: int = 320) -> None:
    if width == 2:
        raise Fail("no such picture")
"""
TABLE = "path,width\n/a.png,1\n/b.png,wide\n/c.png,2\n/d.png,3\n"
# Commands, in the order of a story.
STORY = """
pipeline load {url} pictures.csv --app {app} --task thumbnail --rejects rejects --name today
pipeline load {url} pictures.csv --app {app} --task thumbnail --rejects rejects --name today
RUN
pipeline archive {url} archive
pipeline report archive
pipeline reconcile pictures.csv pictures --on path --archive archive --grace-period 0s
pipeline replay {url} pictures --archive archive --state done --where "task = 'thumbnail'" --name more
pipeline dedupe {url} pictures --on kwargs.path --include-done --delete
pipeline report nowhere
"""
# Fields whose values are a matter of time and speed.
VARIES = {"at", "busy_s", "files", "made_at", "max", "p50", "p90", "p99", "per_second", "replaced", "since", "step_s"}
VARIES |= {"until", "worker"}


def test_golden_json_of_the_pipeline(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"golden_pipeline_{os.getpid()}"
    (tmp_path / f"{module}.py").write_text(APP)
    (tmp_path / "pictures.csv").write_text(TABLE)
    normal = Normal({str(tmp_path): "<folder>", module: "<app>", URL: "URL"}, VARIES.__contains__)
    found: list[Any] = []
    for line in STORY.format(app=f"{module}:tasks", url=f"'{URL}'").strip().splitlines():
        if line == "RUN":
            command = [PYTHON, "-m", "qworker", "run", f"{module}:tasks", "--burst"]
            subprocess.run(command, check=True, env=environment(), timeout=PATIENCE)
            capsys.readouterr()
        else:
            found.append(json_of_command(shlex.split(line), normal, capsys, _without_curves))
    check("pipeline", found)


def _without_curves(printed: Any) -> Any:
    """Return a report with only the names of the values over time, because their number depends on the speed."""
    if isinstance(printed, dict) and "moments" in printed:
        depths = [{**depth, "counts": []} for depth in printed["depths"]]
        return {**printed, "moments": [list(printed["moments"][0])], "depths": depths}
    return printed
