"""`qworker pipeline` as a process of its own: what a terminal shows, what spark-submit says, and who has no Spark."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.java import QUICK_JAVA
from tests.support.processes import environment

# Not of the group that shares a session: each starts a Spark of its own, or none.
pytestmark = pytest.mark.timeout(300)


def test_a_terminal_shows_progress_and_nothing_of_spark(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    leader, follower = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "qworker", "pipeline", "report", "archive", "--json", "--master", "local[1]"],
        cwd=tmp_path,
        env=environment(JAVA_TOOL_OPTIONS=QUICK_JAVA),
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    shown = _everything(leader)
    assert done.stdout is not None
    with done.stdout as output:
        assert json.loads(output.read())["queues"] == []
    assert done.wait() == 0
    assert re.search(r"report: starting Spark, \d+ s", shown)
    # Each state of the line replaces the one before, and the last one is cleared.
    assert re.sub(r"\r\x1b\[Kreport: [^\r\n]*", "", shown) == "\r\x1b[K"


def test_what_spark_submit_was_told_is_what_is_used(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from qworker.pipeline import start_session\n"
        "spark = start_session()\n"
        "print(spark.sparkContext.master, spark.conf.get('spark.answer'))\n"
    )
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [programs / "spark-submit", "--master", "local[3]", "--conf", "spark.answer=42", "app.py"],
        cwd=tmp_path,
        env=environment(PATH=f"{programs}:{os.environ['PATH']}", JAVA_TOOL_OPTIONS=QUICK_JAVA),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "local[3] 42\n"), done.stderr


def _everything(terminal: int) -> str:
    told = b""
    while True:
        try:
            more = os.read(terminal, 4096)
        except OSError:
            # Nobody has the other end any more.
            more = b""
        if not more:
            os.close(terminal)
            return told.decode()
        told += more


@pytest.mark.parametrize("lacks", ["java", "pyspark"])
def test_who_has_no_spark_is_told_the_mend(tmp_path: Path, lacks: str) -> None:
    (tmp_path / "java").mkdir()
    block = "" if lacks == "java" else "sys.modules['pyspark'] = None; "
    code = f"import sys; {block}from qworker.cli.main import main; sys.exit(main(['pipeline', 'report', 'x']))"
    home = {"JAVA_HOME": str(tmp_path / "java")} if lacks == "java" else {}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(**home), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert ("openjdk-17" if lacks == "java" else "pip install '.[spark]'") in done.stderr
