"""Turn Spark's errors into one line: the qworker error that a task or the driver raised."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from pyspark.errors import AnalysisException, PySparkException
from pyspark.logger import PySparkLogger

from qworker import errors
from qworker.errors import BackendError, QworkerError, UsageError

__all__ = ["raise_qworker_errors", "to_qworker_error"]

# The last line of a Python traceback, anywhere in the text of the JVM. Without frames, a text of Spark can precede it.
_OURS = re.compile(r"(?:^\s*|: )qworker\.errors\.(\w+): (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
# The error of any Python traceback: the first line after the frames.
_PYTHONS = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
# `[SOME_CONDITION] text. SQLSTATE: 42703; where`.
_CONDITION = re.compile(r"^\[[A-Z0-9_.]+\] (.+?)(?: SQLSTATE: \w+.*)?$")


@contextmanager
def raise_qworker_errors() -> Generator[None]:
    """Raise a qworker error for each error that Spark raises in the block.

    Raises:
        QworkerError: The qworker error that a task raised; otherwise a `BackendError` with Spark's first line.
    """
    # Spark would print the same error at length on the terminal. The logger must be one of PySpark's own class.
    log = PySparkLogger.getLogger("SQLQueryContextLogger")
    before, log.disabled = log.disabled, True
    try:
        yield
    except Exception as error:
        if not _is_sparks(error):
            raise
        raise to_qworker_error(error) from error
    finally:
        log.disabled = before


def to_qworker_error(error: BaseException) -> QworkerError:
    """Make an error with one line from an error of Spark."""
    text = str(error)
    if found := _OURS.findall(text):
        name, line = found[-1]
        kind = getattr(errors, name, BackendError)
        made = QworkerError.__new__(kind if isinstance(kind, type) and issubclass(kind, QworkerError) else BackendError)
        # The constructors of some errors take other arguments.
        made.args = (line,)
        return made
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, AnalysisException):
        # The caller gave the column names and the SQL.
        return UsageError(_CONDITION.sub(r"\1", first))
    lines = _PYTHONS.findall(text)
    return BackendError(f"Spark failed: {lines[-1] if lines else first}")


def _is_sparks(error: Exception) -> bool:
    return isinstance(error, PySparkException) or type(error).__module__.startswith("py4j.")
