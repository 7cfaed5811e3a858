"""`qworker pipeline`: what people type, what they see, and what they do not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qworker.cli.main import main
from qworker.cli.pipeline.load import file_fingerprint
from qworker.duration import parse_moment
from qworker.errors import UsageError
from qworker.message import SettleAction, State
from tests.spark.stores import count, finish

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

URL = "file://./spool?keep_done=all&sync=off"
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
    def ok(*arguments: str, status: int = 0) -> str:
        found, out, err = qworker(*arguments)
        assert (found, err) == (status, ""), err
        return out

    name = f"pipeline_app_{os.getpid()}"
    (folder / f"{name}.py").write_text(APP)
    (folder / "pictures.csv").write_text("path,width\n/a.png,64\n/b.png,wide\n/c.png,128\n/d.png,256\n")
    app = ["--app", f"{name}:tasks", "--task", "thumbnail", "--rejects", "rejects"]
    loaded = json.loads(ok("load", URL, "pictures.csv", *app, "--json"))
    assert (loaded["enqueued"], loaded["rejected"], loaded["queue"]) == (3, 1, "pictures")
    assert count(URL, State.READY, "pictures") == 3

    finish(URL, 1, SettleAction.ACK, "pictures")
    finish(URL, 1, SettleAction.FAIL_PERM, "pictures", "TimeoutError: 3 s")
    assert "added 2 messages and 0 events" in ok("archive", URL, "archive", "pictures", "--no-history")

    told = ok("report", "archive", "--html", "report.html")
    assert re.search(r"^pictures +2 +1 +1 +0 ", told, re.MULTILINE)
    assert "TimeoutError: 3 s" in told
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    (totals,) = json.loads(ok("report", URL, "pictures", "--since", "1h", "--json"))["queues"]
    assert (totals["done"], totals["failed"], totals["open"]) == (1, 1, 1)

    compare = ["reconcile", "pictures.csv", "pictures", "--on", "path", "--url", URL]
    assert re.search(r"^never enqueued +1 +0 +/b.png$", ok(*compare, status=1), re.MULTILINE)

    replayed = ok("replay", URL, "pictures", "--where", "error like 'Timeout%'")
    assert "requeue  thumbnail  " in replayed
    assert "pictures: 1 chosen, requeued 1, enqueued 0, left alone 0\n" in replayed
    assert ok("dedupe", URL, "pictures") == "pictures: 0 messages too many, of 0 keys\n"
    assert count(URL, State.READY, "pictures") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nowhere"], "the archive does not exist"),
        (["load", URL, "rows.xyz", "--task", "t"], "does not name a format"),
        (["load", URL, "absent.parquet", "--task", "t", "--queue", "q"], "absent.parquet"),
        (["replay", URL, "pictures", "--where", "nothing = 1"], "is not valid"),
        (["reconcile", "rows.csv", "q", "--on", "a"], "pass --url"),
        (["report", "nowhere", "--conf", "nonsense"], "write KEY=VALUE"),
        (["report", "memory:"], "memory:"),
    ],
)
def test_a_mistake_is_one_line(
    spark: SparkSession, qworker: Any, folder: Path, arguments: list[str], words: str
) -> None:
    (folder / "spool").mkdir()
    status, out, err = qworker(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_an_age_and_a_date_are_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert [parse_moment(words) for words in ("90s", "24h", "1.5d")] == [999_910.0, 913_600.0, 870_400.0]
    assert parse_moment("1970-01-02") == parse_moment("1970-01-02T02:00+02:00") == 86_400.0
    with pytest.raises(UsageError, match="or a time such as"):
        parse_moment("soon")


def test_a_load_of_other_files_is_another_job(folder: Path) -> None:
    (folder / "rows").mkdir()
    table = folder / "rows" / "a.csv"
    table.write_text("a\n1\n")
    before = file_fingerprint("rows")
    assert file_fingerprint("rows") == before
    table.write_text("a\n2\n3\n")
    assert file_fingerprint("rows") != before
    assert file_fingerprint("s3a://bucket/rows") == ["s3a://bucket/rows"]
