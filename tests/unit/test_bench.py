"""The bench is used rarely: its arithmetic, and one figure in small, are proved here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
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
