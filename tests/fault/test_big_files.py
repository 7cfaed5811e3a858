"""Files that no worker can read into its memory: a sparse file of 200 GB in `queue/` and in `delay/`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft
from tests.support.processes import environment, started

SIZE = 200 << 30
# Bytes of address space: more than a worker needs, and less than one of the files.
MEMORY = 6_000_000 << 10
APP = """
import os
from qworker import Message, Tasks

tasks = Tasks(os.environ["STORE"])

@tasks.raw_handler(queue="work")
async def on(message: Message) -> None:
    os.write(1, b"ran " + message.body + b"\\n")
"""
LIMITED = (
    "-c",
    f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
from qworker.cli.main import main
sys.exit(main(sys.argv[1:]))
""",
)
OLDEST, NEWEST = "_20200101000000_000000001_1_host-aaaaaaaa_0", "_20990101000000_000000001_1_host-aaaaaaaa_0"


def publish(url: str, *bodies: bytes) -> None:
    async def run() -> None:
        backend = open_backend(url)
        try:
            await backend.publish("work", [Draft(body=body) for body in bodies])
        finally:
            await backend.aclose()

    asyncio.run(run())


def make_sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(SIZE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.mark.parametrize("scheme", ["file", "fsq", "vsqs", "mq"])
def test_everything_behind_a_file_that_is_too_big_runs_and_it_is_reported_once(folder: Path, scheme: str) -> None:
    url = f"{scheme}://{folder}/spool" + ("" if scheme == "file" else "?max_body=64MiB")
    publish(url, b"first", b"second")
    places = {
        "file": [f"work/queue/{OLDEST}", f"work/queue/{NEWEST}", f"work/delay/1577836800000.{OLDEST}"],
        "fsq": [f"work/queue/{OLDEST}", f"work/queue/{NEWEST}"],
        "vsqs": ["work/1577836800000000"],
        "mq": ["queues/work/00000000-0000-1000-8000-000000000000"],
    }[scheme]
    big = [folder / "spool" / place for place in places]
    for path in big:
        make_sparse(path)
    with started(folder, "run", "app:tasks", "--log-format", "json", program=LIMITED, env={"STORE": url}) as process:
        process.line("ran first")
        process.line("ran second")
        process.event("message_too_large", len(big))
        publish(url, b"third")
        process.line("ran third")
        assert process.drain() == 0, process.text
        events = process.events("message_too_large")
    assert len(events) == len(big)
    assert all("max_body=64MiB" in event["reason"] and f"{SIZE} bytes" in event["reason"] for event in events)
    assert all(path.stat().st_size == SIZE for path in big)


def test_operators_see_a_file_that_is_too_big_without_reading_it(folder: Path) -> None:
    url = f"file://{folder}/spool"
    publish(url, b"first")
    make_sparse(folder / "spool" / "work" / "queue" / OLDEST)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *LIMITED, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    assert "1 message with more than max_body=64MiB" in (found := run("doctor", url))
    assert "?max_body=200GiB" in found
    assert "first" in run("browse", url, "work")
    assert "2" in run("stats", url)
    assert os.stat(folder / "spool" / "work" / "queue" / OLDEST).st_size == SIZE
