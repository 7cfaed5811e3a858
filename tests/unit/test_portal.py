"""Calls from code without an event loop, where gevent has replaced what they stand on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend

PROGRAM = """
from gevent import monkey

monkey.patch_all({patched})

import asyncio
import gevent
from qworker import Tasks

tasks = Tasks("file://./spool")


@tasks.task
def work(n: int) -> None: ...


def told(n):
    try:
        return work.enqueue_sync(n).id
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"


def advised(n):
    job = gevent.get_hub().threadpool.apply(lambda: asyncio.run(work.enqueue(n)))
    return f"stored {{job.queue}}"


greenlets = [gevent.spawn({call}, n) for n in range(5)]
gevent.joinall(greenlets, timeout=30, raise_error=True)
print("\\n".join(greenlet.value for greenlet in greenlets))
"""


def run(folder: Path, call: str, patched: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call, patched=patched)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("patched", "problem"), [("", "gevent has replaced threads"), ("thread=False", "gevent has replaced select")]
)
def test_under_gevent_every_blocking_call_is_refused_with_what_to_do(tmp_path, patched, problem):
    lines = run(tmp_path, "told", patched)
    assert len(lines) == 5
    for line in lines:
        assert line.startswith(f"UsageError: {problem}")
        assert "gunicorn -k gthread" in line


async def create_default(folder: Path) -> None:
    backend = open_backend(f"file://{folder}/spool")
    await backend.create("default")
    await backend.aclose()


def test_what_the_refusal_says_to_do_works_in_every_greenlet(tmp_path):
    # Five threads that create one queue would open and close many files: gevent's `os.close` in a thread can take a
    # number that is open again for one that it is still closing.
    asyncio.run(create_default(tmp_path))
    assert run(tmp_path, "advised") == ["stored default"] * 5
    assert len(list((tmp_path / "spool" / "default" / "queue").iterdir())) == 5
