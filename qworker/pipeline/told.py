"""What Spark says of an error, put into one line: the error of ours that a task or the driver's planner raised."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from pyspark.errors import AnalysisException, PySparkException
from pyspark.logger import PySparkLogger

from qworker import errors
from qworker.errors import BackendError, QworkerError, UsageError

__all__ = ["plain", "plain_error"]

# The last line of a Python traceback, anywhere in what the JVM made of it.
_OURS = re.compile(r"^\s*qworker\.errors\.(\w+): (.+)$", re.MULTILINE)
# And of anybody's: the first line after the frames.
_PYTHONS = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
# `[SOME_CONDITION] text. SQLSTATE: 42703; where`.
_CONDITION = re.compile(r"^\[[A-Z0-9_.]+\] (.+?)(?: SQLSTATE: \w+.*)?$")


@contextmanager
def plain() -> Generator[None]:
    """Let what Spark raises in the block arrive as an error of the one tree.

    Raises:
        QworkerError: what a task raised of ours; else `BackendError` with Spark's first line.
    """
    # Spark would tell the same on the terminal, at a length that nobody reads.
    # (asked of PySpark, whose own kind of logger it must be, whoever asks first).
    log = PySparkLogger.getLogger("SQLQueryContextLogger")
    before, log.disabled = log.disabled, True
    try:
        yield
    except Exception as error:
        if not _is_sparks(error):
            raise
        raise plain_error(error) from error
    finally:
        log.disabled = before


def plain_error(error: BaseException) -> QworkerError:
    """One line for what Spark raised."""
    text = str(error)
    if found := _OURS.findall(text):
        name, line = found[-1]
        kind = getattr(errors, name, BackendError)
        made = QworkerError.__new__(kind if isinstance(kind, type) and issubclass(kind, QworkerError) else BackendError)
        # Some of them make their text from other things.
        made.args = (line,)
        return made
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, AnalysisException):
        # Column names and SQL are the caller's.
        return UsageError(_CONDITION.sub(r"\1", first))
    lines = _PYTHONS.findall(text)
    return BackendError(f"Spark failed: {lines[-1] if lines else first}")


def _is_sparks(error: Exception) -> bool:
    return isinstance(error, PySparkException) or type(error).__module__.startswith("py4j.")
