"""Spark reads out of a stored error what everybody else does."""

from __future__ import annotations

import traceback

from pyspark.sql import SparkSession

from qworker.errors import UsageError
from qworker.failure_text import summary
from qworker.pipeline.timelines import first_line


def text(error: BaseException, cause: BaseException | None = None) -> str:
    return "".join(traceback.format_exception(raised(error, cause))).rstrip()


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        _raise(error, cause)
    except BaseException as caught:  # noqa: BLE001 - whatever it is
        return caught
    raise AssertionError


def _raise(error: BaseException, cause: BaseException | None) -> None:
    if cause is not None:
        raise error from raised(cause)
    raise error


GROUP = ExceptionGroup("many", [ValueError("a\nb"), ExceptionGroup("some", [OSError("x")])])


def test_a_stored_error_has_the_same_line_in_a_table(spark: SparkSession) -> None:
    texts = [
        text(ValueError("no luck\nat all")),
        text(UsageError("of a module: a.b: c")),
        text(GROUP),
        text(KeyError("a"), GROUP),
        text(GROUP, KeyError("a")),
        text(SyntaxError("bad", ("file", 1, 1, "x = = 1"))),
        text(ValueError()),
        "told to slow down\n\n" + text(ValueError("no luck")),
        "\n a.b: plain \nmore",
        "",
    ]
    found = spark.createDataFrame([(n, one) for n, one in enumerate(texts)], "n int, error string")
    rows = found.select("n", first_line("error").alias("line")).orderBy("n").collect()
    assert [row["line"].strip() for row in rows] == [summary(one) for one in texts]
    assert spark.sql("select cast(null as string) as error").select(first_line("error")).first()[0] is None
