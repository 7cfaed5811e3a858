"""Spark Connect: a program that has no JVM of its own, on a server that this machine runs for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.java import QUICK_JAVA

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

# One process can have a session of only one kind.
PROGRAM = """
import asyncio, json, sys
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from qworker.backend.registry import open_backend
from qworker.message import SettleAction, Settlement
from qworker.pipeline.jobs.archive import archive, read_archive
from qworker.pipeline.jobs.load import load
from qworker.pipeline.session import register_data_source

url, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").config("spark.sql.warehouse.dir", folder).getOrCreate()
register_data_source(spark)
said = {"session": type(spark).__module__}

def write(rows):
    frame = spark.sql("SELECT " + rows).coalesce(1)
    frame.write.format("qworker").mode("append").option("url", url).option("queue", "q").save()

def read(query="SELECT task, args FROM calls ORDER BY task, args"):
    return [list(row) for row in spark.sql(query).collect()]

async def ack_all():
    backend = open_backend(url)
    leases = await backend.lease("q", 100, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    await backend.aclose()
    return len(leases)

write("'a' AS task, '[1]' AS args")
spark.sql(f"CREATE TABLE calls USING qworker OPTIONS (url '{url}', queue 'q', columns 'task,args')")
spark.sql("INSERT INTO calls VALUES ('b', '[2]')")
said["rows"] = read()
for name, rows in {"row": "'t' AS task, 12 AS priority", "column": "'t' AS task, 1 AS what"}.items():
    try:
        write(rows)
    except PySparkException as error:
        said[name] = str(error)
said["loaded"] = load(spark, spark.range(3), url, "q", "c", {"n": "id"}, name="l").enqueued
said["acked"] = asyncio.run(ack_all())
result = archive(spark, url, folder + "/archive", delete=True)
said["archived"] = [result.messages, result.removed, read_archive(spark, folder + "/archive").count()]
spark.stop()
print(json.dumps(said))
"""


def test_everything_works_through_spark_connect(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool?sync=off&keep_done=all"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    # The server is another process, and its Python workers must find qworker.
    variables |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(tmp_path), "JAVA_TOOL_OPTIONS": QUICK_JAVA}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["session"] == "pyspark.sql.connect.session"
    assert said["rows"] == [["a", "[1]"], ["b", "[2]"]]
    assert "the column 'priority' must be from 0 to 9 (got 12)" in said["row"]
    assert "the column 'what' is not one of" in said["column"]
    assert "Traceback" not in said["row"] + said["column"]
    assert (said["loaded"], said["acked"], said["archived"]) == (3, 5, [5, 5, 5])
