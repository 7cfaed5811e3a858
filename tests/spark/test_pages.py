"""Run the Python blocks of the pages about Spark, each in its own folder with tables and queues."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qworker.message import SettleAction, State
from qworker.pipeline.jobs.archive import archive
from tests.spark.stores import count, finish, publish
from tests.support.pages import blocks, pages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

APP = """\
from qworker import Tasks

tasks = Tasks("file://./spool")


@tasks.task(queue="thumbs")
def thumbnail(path: str, width: int = 100) -> None: ...
"""
PAGES = [page for page in pages() if page.startswith("docs/pipeline/")]


@pytest.fixture(scope="module")
def beside(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: a queue with failures, its archive, and a table."""
    folder = tmp_path_factory.mktemp("beside")
    (folder / "app.py").write_text(APP)
    queue = f"file://{folder}/var/spool/app"
    publish(queue, [b'{"task": "thumbnail", "args": ["a.png"]}'] * 3, "thumbs")
    finish(queue, 2, SettleAction.FAIL_PERM, "thumbs", "no such picture")
    archive(spark, queue, str(folder / "archive"))
    publish(f"sq://{folder}/var/spool/log?channel=spark", [b"an order"], "orders")
    spark.createDataFrame([("a.png",), ("b.png",)], "path string").write.parquet(str(folder / "data" / "pictures"))
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.file for block in blocks(page))])
def test_the_python_of_a_page_about_spark_runs(
    page: str, spark: SparkSession, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(beside)
    monkeypatch.syspath_prepend(str(beside))
    queue = f"file://{beside}/var/spool/app"
    waiting = count(queue, State.READY, "thumbs")
    written = 0
    for block in blocks(page):
        if block.language != "python":
            continue
        assert block.file is not None
        text = (
            block.text.replace("/var/", f"{beside}/var/")
            .replace("/data/", f"{beside}/data/")
            .replace('"archive/', f'"{beside}/archive/')
        )
        Path(block.file).write_text(text)
        try:
            runpy.run_path(block.file)
            for query in spark.streams.active:
                query.processAllAvailable()
        finally:
            for query in spark.streams.active:
                query.stop()
        written += {"write.py": 2, "stream.py": 2, "loading.py": 2, "sql.py": 1}.get(block.file, 0)
    assert count(queue, State.READY, "thumbs") == waiting + written
