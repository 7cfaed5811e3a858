"""Workers that are replaced one after another under load: the figure `restarts` of the bench, in small."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.timeout(300)
def test_rolling_restarts_lose_nothing_and_run_nothing_twice_at_once(tmp_path: Path) -> None:
    """The figure in small: real workers, replaced one after another, half of them without the time to finish."""
    target = tmp_path / "bench.json"
    options = ["--quick", "--only", "restarts", "--directory", str(tmp_path), "--json", str(target)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(target.read_text())["figures"]
    assert len(figures) == 6
    assert all(figure["measured"] == 0 for figure in figures), done.stdout
    # Some runs were really cut short.
    assert not all(re.match("0 runs", figure["note"]) for figure in figures if "runs" in figure["note"])
