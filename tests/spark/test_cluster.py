"""The same commands on a cluster: executors of their own processes, of which one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as arrow_dataset
import pytest

from qworker.message import SettleAction, State
from tests.spark.cluster import Cluster, running_cluster
from tests.spark.java import QUICK_JAVA
from tests.spark.stores import bodies, count, finish
from tests.support.processes import environment
from tests.support.waiting import wait_for

# Not of the group that shares a session: the cluster is its own.
pytestmark = pytest.mark.timeout(400)

ROWS = 20_000
APP = """
from qworker import Tasks
tasks = Tasks("memory:")

@tasks.task(queue="jobs")
async def thumbnail(path: str) -> None: ...
"""


def _pipeline(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    options = {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    settings = [part for key, value in options.items() for part in ("--conf", f"{key}={value}")]
    return subprocess.Popen(
        [sys.executable, "-m", "qworker", "pipeline", *arguments, "--json", "--master", cluster.url, *settings],
        cwd=folder,
        env=environment(JAVA_TOOL_OPTIONS=QUICK_JAVA),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(command: subprocess.Popen[str]) -> dict[str, object]:
    out, err = command.communicate()
    assert command.returncode == 0, err
    return json.loads(out)


def test_a_cluster_loads_and_archives_each_row_once_though_an_executor_is_killed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool?keep_done=all&sync=off"
    (tmp_path / "app.py").write_text(APP)
    # Many small files: many tasks, of which some run when the executor dies and some come after.
    (tmp_path / "rows").mkdir()
    for part in range(10):
        lines = [json.dumps({"path": f"{row}.png"}) for row in range(part, ROWS, 10)]
        (tmp_path / "rows" / f"{part}.json").write_text("\n".join(lines))

    with running_cluster(tmp_path / "cluster") as cluster:
        load = _pipeline(
            cluster,
            tmp_path,
            *("load", url, "rows", "--format", "json", "--app", "app:tasks", "--task", "thumbnail"),
            *("--name", "pictures", "--conf", "spark.sql.files.openCostInBytes=100000000"),
        )
        staged = tmp_path / "spool" / "jobs" / "tmp" / "staged" / "pictures"
        wait_for(lambda: load.poll() is not None or any(staged.glob("run-*/*")), "rows are staged", timeout=200.0)
        assert load.poll() is None, load.communicate()[1]
        os.kill(cluster.executors()[0], signal.SIGKILL)
        assert _ended(load)["enqueued"] == ROWS
        wait_for(lambda: cluster.killed() == 1, "the worker has noticed the death")
        paths = [json.loads(body)["kwargs"]["path"] for body in bodies(url, State.READY)]
        assert sorted(paths) == sorted(f"{row}.png" for row in range(ROWS))

        for _ in range(10):
            # Fewer at once than files can be open.
            finish(url, ROWS // 10, SettleAction.ACK)
        _ended(_pipeline(cluster, tmp_path, "archive", url, "archive", "--delete"))
    assert count(url, State.DONE) == 0
    archived = arrow_dataset.dataset(tmp_path / "archive" / "messages", partitioning="hive").to_table(columns=["id"])
    assert len(set(archived["id"].to_pylist())) == archived.num_rows == ROWS
