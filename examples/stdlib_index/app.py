"""An index of the Python installation that runs this program: one message per file, and a table of the results."""

from __future__ import annotations

import argparse
import ast
import os
import sqlite3
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from qworker import Fail, Tasks

DATABASE = Path("index.sqlite")

tasks = Tasks("file://./spool")


class Counts(NamedTuple):
    """The counts of one file."""

    functions: int
    classes: int
    lines: int


class Totals(NamedTuple):
    """The counts of all files."""

    files: int
    functions: int
    classes: int
    lines: int


@tasks.task(queue="files", max_tries=20)
def index(path: str) -> None:
    """Count one file, and store its counts.

    If a worker is killed after the row is stored and before the message is acked, the file is counted again. The key of
    the row is the path, so the second attempt changes nothing. "At least once" needs no more of a handler.
    """
    counts = count(Path(path))
    if counts is None:
        raise Fail("not the Python of this interpreter")
    with closing(sqlite3.connect(DATABASE, timeout=60)) as database, database:
        database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (path, *counts))


def count(path: Path) -> Counts | None:
    """Parse a file and return its counts. None: it cannot be parsed, as some test files of Python cannot."""
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = classes = 0
    for node in ast.walk(tree):
        functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        classes += isinstance(node, ast.ClassDef)
    return Counts(functions, classes, source.count(b"\n"))


def installation() -> list[Path]:
    """Return the modules of this Python and of installed packages, at most $QWORKER_EXAMPLE_FILES of them."""
    roots = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found = sorted({path for root in roots for path in root.rglob("*.py") if path.is_file()})
    limit = int(os.environ.get("QWORKER_EXAMPLE_FILES", len(found)))
    # The sample is spread over all modules. The first thousand would be of a few packages only.
    return found[:: max(1, len(found) // max(1, limit))][:limit]


def create() -> None:
    """Create an empty table, in a mode in which readers and writers do not wait for each other."""
    with closing(sqlite3.connect(DATABASE, timeout=60)) as database, database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(
            "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, functions INT, classes INT, lines INT)"
        )
        database.execute("DELETE FROM files")


def indexed() -> Totals:
    """Return the totals of the rows that the workers have stored."""
    with closing(sqlite3.connect(DATABASE, timeout=60)) as database:
        row = database.execute("SELECT count(*), total(functions), total(classes), total(lines) FROM files").fetchone()
    return Totals(*(int(value) for value in row))


def sequential() -> Totals:
    """Return the totals of a pass without a queue, one file after another."""
    counted: Iterator[Counts | None] = (count(path) for path in installation())
    rows = [counts for counts in counted if counts is not None]
    functions, classes, lines = (sum(column) for column in zip(*rows, strict=True))
    return Totals(len(rows), functions, classes, lines)


def main() -> None:
    """Enqueue the files, show the index, or compare it with a sequential pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["enqueue", "totals", "check"])
    action: str = parser.parse_args().action
    if action == "enqueue":
        create()
        jobs = tasks.enqueue_many_sync(index.call(str(path)) for path in installation())
        print(f"{len(jobs)} files enqueued")
    elif action == "totals":
        print(indexed())
    else:
        wanted, found = sequential(), indexed()
        print(f"one after another: {wanted}\nby the workers:    {found}")
        sys.exit(wanted != found)


if __name__ == "__main__":
    main()
