"""The demo shows what it promises, or says that it does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.processes import started
from tests.support.waiting import PATIENCE, wait_for


def test_the_demo_kills_a_worker_and_loses_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "demo", env={"TMPDIR": str(tmp_path)}) as process:
        assert process.end() == 0, process.text
        assert "with SIGKILL in the middle of `film`" in process.text
        assert "`film` runs again" in process.text
        assert "with tries 1" in process.text
        assert "`text` failed permanently" in process.text
        assert "Traceback" not in process.text
    assert not list(tmp_path.glob("qworker-demo-*"))


def test_the_dashboard_of_the_demo_shows_a_busy_shop_and_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "demo", "--ui", "--port", "0", env={"TMPDIR": str(tmp_path)}) as process:
        link = process.line("/login?t=").strip()
        with httpx.Client(follow_redirects=True, timeout=PATIENCE) as client:
            overview = client.get(link)
            assert overview.status_code == 200
            assert 'class="spark"' in overview.text
            failures = str(overview.url.join("failures"))
            # A worker was killed, and another one has run what it left.
            wait_for(lambda: "poison" in client.get(failures).text, "the poison message to fail")
        # A terminal sends it to the workers, too.
        os.killpg(process.pid, signal.SIGINT)
        assert process.end() == 0, process.text
    assert not list(tmp_path.glob("qworker-demo-*"))


@pytest.mark.parametrize("arguments", [["--ui", "--keep"], ["--port", "0"]])
def test_options_of_one_demo_are_refused_by_the_other(tmp_path: Path, arguments: list[str]) -> None:
    with started(tmp_path, "demo", *arguments) as process:
        assert process.end() == 2
        assert " is for --ui" in process.text or "is not for --ui" in process.text
