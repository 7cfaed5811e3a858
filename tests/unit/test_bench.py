"""The bench is used rarely: its arithmetic, and one figure in small, are proved here."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_report", BENCH / "harness" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_percentiles_are_values_that_were_measured(report: ModuleType) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [report.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert report.percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(
    ("measured", "at_most", "met"), [(1.0, True, True), (1.1, True, False), (1.0, False, True), (0.9, False, False)]
)
def test_a_figure_is_met_on_the_right_side_of_what_was_asked(
    report: ModuleType, measured: float, at_most: bool, met: bool
) -> None:
    figure = report.Figure(figure="f", what="w", measured=measured, unit="x", asked=1.0, at_most=at_most)
    assert figure.met is met
    assert ("| yes |" in report.as_table([figure])) is met


@pytest.mark.timeout(300)
def test_a_figure_runs_in_small_and_writes_what_it_measured(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    options = ["--quick", "--only", "overhead", "--directory", str(tmp_path), "--json", str(target)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (figure,) = json.loads(target.read_text())["figures"]
    assert 0 < figure["measured"] < 10_000
    assert figure["figure"] == "overhead"
    assert "| overhead |" in done.stdout


# -- the code of a commit beside this tree's ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verdict() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("harness.verdict")
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("at_most", "old", "new", "ratio", "spread", "said"),
    [
        # A rate: more is better.
        (False, [90, 100, 110], [96, 96, 96], 0.96, (0.9, 1.1), "ok"),
        (False, [90, 100, 110], [92, 92, 92], 0.92, (0.9, 1.1), "within the spread"),
        (False, [90, 100, 110], [89, 89, 89], 0.89, (0.9, 1.1), "worse"),
        (False, [100, 100, 100], [300, 94, 94], 0.94, (1.0, 1.0), "worse"),
        (False, [90, 100, 110], [200, 200, 200], 2.0, (0.9, 1.1), "ok"),
        # A cost: less is better.
        (True, [8, 10, 12.5], [10.5, 10.5, 10.5], 10 / 10.5, (0.8, 1.25), "ok"),
        (True, [8, 10, 12.5], [12.5, 12.5, 12.5], 0.8, (0.8, 1.25), "within the spread"),
        (True, [8, 10, 12.5], [13, 13, 13], 10 / 13, (0.8, 1.25), "worse"),
        (True, [8, 10, 12.5], [5, 5, 5], 2.0, (0.8, 1.25), "ok"),
        # Counts, of which 0 is the best, and growth that may be negative: they have no ratio.
        (True, [0, 0, 0], [0, 0, 0], 1.0, (1.0, 1.0), "ok"),
        (True, [0, 0, 0], [1, 1, 1], 0.0, (1.0, 1.0), "worse"),
        (True, [0, 0, 1], [1, 1, 1], 0.0, (0.0, 1.0), "within the spread"),
        (True, [2, 2, 2], [0, 0, 0], 1.0, (1.0, 1.0), "ok"),
        (True, [-1, -1, -1], [-2, -2, -2], 1.0, (1.0, 1.0), "ok"),
    ],
)
def test_a_code_is_worse_when_it_is_slower_and_the_old_one_never_was_so_slow(
    verdict: ModuleType,
    at_most: bool,
    old: list[float],
    new: list[float],
    ratio: float,
    spread: tuple[float, float],
    said: str,
) -> None:
    found = verdict.Comparison(figure="f", what="w", unit="", at_most=at_most, old=old, new=new)
    assert (found.ratio, found.spread, found.verdict) == (pytest.approx(ratio), pytest.approx(spread), said)


def test_numbers_are_compared_by_their_names_and_what_only_one_code_measures_is_named(verdict: ModuleType) -> None:
    def figure(what: str, measured: float, unit: str = "/s") -> dict[str, object]:
        return {"figure": "f", "what": what, "unit": unit, "at_most": False, "measured": measured}

    # With / without: that it falls when what is without gets faster makes nothing worse.
    ratio = figure("ratio", 1.0, "x")
    old = [[figure("both", 1.0), ratio, figure("gone", 1.0)], [figure("both", 2.0), ratio, figure("gone", 1.0)]]
    new = [[figure("both", 3.0), ratio, figure("come", 1.0)], [figure("both", 4.0), ratio, figure("come", 1.0)]]
    (found,), alone = verdict.compared(old, new)
    assert (found.what, found.old, found.new) == ("both", [1.0, 2.0], [3.0, 4.0])
    assert alone == ["f: only the new code has 'come'", "f: only the old code has 'gone'"]


_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1"
[project.entry-points."qworker.backends"]
fake = "{backend}:SPEED"
[tool.hatch.build.targets.wheel]
packages = ["qworker", "backends/{backend}"]
"""

_MAIN = """
import qworker
from importlib.metadata import entry_points
(backend,) = entry_points(group="qworker.backends")
assert qworker.BACKEND == backend.module
print(backend.load())
"""

_FIGURES = """
import subprocess, sys
from harness import Bench, Figure
FIGURES, SPARK_FIGURES, COUNTED = {names}, (), ()

def measure(name, bench):
    assert bench.own
    speed = bench.call({{"fake": fake, "broken": broken}}[name])
    return [Figure(figure=name, what="speed", measured=speed, unit="/s", at_most=False)]

def fake(given):
    # As a figure starts a worker: Python imports what lies in the folder where it is started.
    return float(subprocess.run([sys.executable, "-m", "qworker"], capture_output=True, check=True).stdout)

def broken(given):
    import qworker
    return qworker.since_today
"""


class Project:
    """A small repository with the bench's own programs: figures and a qworker that say whose code runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bench = folder / "tests" / "bench"
        folder.mkdir()
        self._git("init", "-q")

    def code(self, name: str, backend: str, speed: float, more: str = "") -> None:
        shutil.rmtree(self.folder / "backends", ignore_errors=True)
        package = self.folder / "backends" / backend
        for path in (package, self.folder / "qworker"):
            path.mkdir(parents=True, exist_ok=True)
        (self.folder / "pyproject.toml").write_text(_PROJECT.format(name=name, backend=backend))
        (self.folder / "qworker" / "__init__.py").write_text(f"BACKEND = {backend!r}\n{more}\n")
        (self.folder / "qworker" / "__main__.py").write_text(_MAIN)
        (package / "__init__.py").write_text(f"SPEED = {speed}\n")

    def drivers(self, *names: str) -> None:
        if not self.bench.exists():
            shutil.copytree(BENCH, self.bench, ignore=shutil.ignore_patterns("figures", "peers", "__pycache__"))
            (self.bench / "figures").mkdir()
        (self.bench / "figures" / "__init__.py").write_text(_FIGURES.format(names=names))

    def commit(self) -> None:
        self._git("add", "--all")
        self._git("-c", "user.name=b", "-c", "user.email=b@example.org", "commit", "-q", "-m", "a state")

    def _git(self, *words: str) -> None:
        subprocess.run(["git", "-C", str(self.folder), *words], check=True)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.bench / "run.py"), "--directory", str(self.folder.parent), *options]
        # Started in a folder that has a qworker: that one must not be taken for either code.
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=BENCH.parents[1])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    # A commit that is older than the bench, one of another distribution that has it, and a tree that is not committed.
    made.code("qworker", "qworker_first", 100.0)
    made.commit()
    made.code("qworker-tasks", "qworker_second", 80.0)
    made.drivers("fake", "broken")
    made.commit()
    made.code("qworker-tasks", "qworker_third", 50.0, "since_today = 1.0")
    return made


@pytest.mark.timeout(300)
def test_each_code_runs_its_own_modules_and_a_slower_one_fails(project: Project, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    done = project.run("--against", "HEAD~1", "--only", "fake", "--rounds", "2", "--json", str(target))
    assert done.returncode == 1, done.stdout + done.stderr
    document = json.loads(target.read_text())
    (found,) = document["comparisons"]
    assert (found["old"], found["new"]) == ([100.0, 100.0], [50.0, 50.0])
    assert (found["ratio"], found["verdict"], document["rounds"]) == (0.5, "worse", 2)
    assert "| worse" in done.stdout


@pytest.mark.timeout(300)
def test_a_figure_that_the_old_code_cannot_measure_is_named_and_does_not_pass(project: Project) -> None:
    project.drivers("fake", "broken", "added")
    done = project.run("--against", "HEAD", "--only", "broken", "--only", "added", "--rounds", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    reason = "AttributeError: module 'qworker' has no attribute 'since_today'"
    assert f"broken is not compared: the old code's bench fails: {reason}" in lines
    assert "added is not compared: the old code's bench does not have it" in lines
    assert done.stderr == ""


@pytest.mark.parametrize("commit", ["nowhere", "--all", "HEAD:qworker"])
def test_a_commit_that_is_not_there_is_one_line(project: Project, commit: str) -> None:
    done = project.run(f"--against={commit}", "--only", "fake")
    assert done.returncode == 2
    assert done.stdout == ""
    assert (
        done.stderr
        == f"bench: there is no commit {commit!r} in {project.folder}: `git log` lists those that there are\n"
    )
