"""`qworker pipeline`: what people type, what they see, and what they do not."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qworker.cli.main import main
from qworker.cli.pipeline.report import moment
from qworker.errors import UsageError
from qworker.message import Settle, State
from tests.e2e.processes import environment
from tests.spark.stores import ask, count, finish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

# What compiles once and runs for a second is not worth the best compiler.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
URL = "file://./spool?keep_done=1&sync=off"
APP = """
from qworker import Tasks
tasks = Tasks("file://./spool")

@tasks.task(queue="pictures")
async def thumbnail(path: str, width: int = 320) -> None: ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in os.environ if n.startswith("QWORKER_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def qworker(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["pipeline", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_a_table_goes_through_every_job(spark: SparkSession, qworker: Any, folder: Path) -> None:
    def ok(*arguments: str) -> Any:
        status, out, err = qworker(*arguments, "--json")
        assert (status, err) == (0, ""), err
        return json.loads(out)

    name = f"pipeline_app_{os.getpid()}"
    (folder / f"{name}.py").write_text(APP)
    (folder / "pictures.csv").write_text("path,width\n/a.png,64\n/b.png,wide\n/c.png,128\n/d.png,256\n")
    load = ["load", URL, "pictures.csv", "--app", f"{name}:tasks", "--task", "thumbnail", "--rejects", "rejects"]
    loaded = ok(*load)
    assert (loaded["enqueued"], loaded["rejected"], loaded["queue"]) == (3, 1, "pictures")
    assert ok(*load)["again"] is True
    assert count(URL, State.READY, "pictures") == 3

    finish(URL, 1, Settle.ACK, "pictures")
    finish(URL, 1, Settle.FAIL_PERM, "pictures", "TimeoutError: 3 s")
    archived = ok("archive", URL, "archive", "pictures")
    assert archived["messages"] == 2

    report = ok("report", "archive", "--html", "report.html")
    assert [(q["queue"], q["done"], q["failed"]) for q in report["queues"]] == [("pictures", 1, 1)]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert ok("report", URL, "pictures", "--since", "1h")["queues"][0]["open"] == 1

    compare = ["reconcile", "pictures.csv", "pictures", "--on", "path", "--url", URL, "--archive", "archive"]
    status, out, _ = qworker(*compare, "--json")
    assert (status, json.loads(out)["never_enqueued"]) == (1, 1)
    assert json.loads(out)["shown"][0]["key"] == "/b.png"

    where = ["--where", "error like 'Timeout%'"]
    assert ok("replay", URL, "pictures", *where, "--archive", "archive", "--dry-run")["requeued"] == 1
    assert ok("replay", URL, "pictures", *where)["requeued"] == 1
    assert ok("dedupe", URL, "pictures", "--on", "kwargs.path", "--delete")["removed"] == 0
    assert count(URL, State.READY, "pictures") == 2


def test_people_read_tables(spark: SparkSession, qworker: Any) -> None:
    ask(URL, lambda backend: backend.create("pictures"))
    status, out, err = qworker("report", URL)
    assert (status, err) == (0, "")
    assert f"file://{os.getcwd()}/spool" in out
    assert qworker("dedupe", URL, "pictures")[1] == "pictures: 0 messages too many, of 0 keys\n"
    replayed = qworker("replay", URL, "pictures", "--where", "true")[1]
    assert "pictures: 0 chosen, requeued 0" in replayed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nowhere"], "there is no archive"),
        (["load", URL, "rows.xyz", "--task", "t"], "does not tell the format"),
        (["load", URL, "absent.parquet", "--task", "t", "--queue", "q"], "absent.parquet"),
        (["replay", URL, "pictures", "--where", "nothing = 1"], "is refused"),
        (["reconcile", "rows.csv", "q", "--on", "a"], "add --url"),
        (["report", "nowhere", "--since", "yesterday"], "is no time"),
        (["report", "nowhere", "--conf", "nonsense"], "write KEY=VALUE"),
        (["report", "memory:"], "memory:"),
    ],
)
def test_a_mistake_is_one_line(spark: SparkSession, qworker: Any, arguments: list[str], words: str) -> None:
    status, out, err = qworker(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_an_age_and_a_date_are_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert [moment(words) for words in ("90s", "24h", "1.5d")] == [999_910.0, 913_600.0, 870_400.0]
    assert moment("1970-01-02") == moment("1970-01-02T02:00+02:00") == 86_400.0
    with pytest.raises(UsageError, match="is no time"):
        moment("soon")


def test_a_terminal_shows_progress_and_nothing_of_spark(folder: Path) -> None:
    (folder / "archive").mkdir()
    leader, follower = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "qworker", "pipeline", "report", "archive", "--json", "--master", "local[1]"],
        cwd=folder,
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
    assert "report: starting Spark, 0 s" in shown
    # Each state of the line replaces the one before, and the last one is cleared.
    assert re.sub(r"\r\x1b\[Kreport: [^\r\n]*", "", shown) == "\r\x1b[K"


def test_what_spark_submit_was_told_is_what_is_used(folder: Path) -> None:
    (folder / "app.py").write_text(
        "from qworker.pipeline import start_session\n"
        "spark = start_session()\n"
        "print(spark.sparkContext.master, spark.conf.get('spark.answer'))\n"
    )
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [programs / "spark-submit", "--master", "local[3]", "--conf", "spark.answer=42", "app.py"],
        cwd=folder,
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
def test_who_has_no_spark_is_told_the_mend(folder: Path, lacks: str) -> None:
    (folder / "java").mkdir()
    block = "" if lacks == "java" else "sys.modules['pyspark'] = None; "
    code = f"import sys; {block}from qworker.cli.main import main; sys.exit(main(['pipeline', 'report', 'x']))"
    home = {"JAVA_HOME": str(folder / "java")} if lacks == "java" else {}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(**home), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert ("openjdk-17" if lacks == "java" else "pip install 'qworker[spark]'") in done.stderr
