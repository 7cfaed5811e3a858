from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qworker.pipeline.session import start_session
from tests.spark.java import QUICK_JAVA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one session of all Spark tests: starting a JVM takes longer than most of them."""
    scratch = tmp_path_factory.mktemp("spark")
    session = start_session(
        # A task that fails is tried once more, as clusters do.
        "local[2,2]",
        options={
            "spark.driver.memory": "768m",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(scratch),
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.driver.extraJavaOptions": _java_options(scratch),
        },
    )
    try:
        yield session
    finally:
        session.stop()


def _java_options(scratch: Path) -> str:
    from qworker.pipeline.session import QUIET_OPTION

    return f"{QUIET_OPTION} {QUICK_JAVA} -Djava.io.tmpdir={scratch}"
