"""The demo shows what it promises, or says that it does not."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import started


def test_the_demo_kills_a_worker_and_loses_nothing(tmp_path: Path) -> None:
    with started(tmp_path, "demo", env={"TMPDIR": str(tmp_path)}) as process:
        assert process.end() == 0, process.text
        assert "with SIGKILL in the middle of `film`" in process.text
        assert "`film` runs again" in process.text
        assert "with tries 1" in process.text
        assert "`text` failed permanently" in process.text
        assert "Traceback" not in process.text
    assert not list(tmp_path.glob("qworker-demo-*"))
