"""A queue that this user may not use: it is shown with its reason, and every other queue of the root works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

USER, GROUP = 54011, 54013
SCHEMES = ("file", "fsq", "vsqs", "sq", "mq")

# A program becomes its user when it has run once and all is imported: only root may be able to read the interpreter.
BECOME = """
import asyncio, contextlib, io, json, logging, os, sys, tempfile
from qworker import Tasks
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.message import Draft
from qworker.server.app import create_app
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions

async def prepare(url):
    backend = open_backend(url)
    for queue in ("mine", "theirs"):
        await backend.publish(queue, [Draft(body=b"x")])
    await backend.stats("mine")
    await backend.aclose()

def become():
    os.setgroups([])
    os.setresgid(54013, 54013, 54013)
    os.setresuid(54011, 54011, 54011)
"""
COMMANDS = """
def told(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()

def commands(url):
    return [told("ls", url), told("stats", url), told("stats", url, "--json"), told("doctor", url)]

with tempfile.TemporaryDirectory() as place:
    scheme = sys.argv[1].partition(":")[0]
    asyncio.run(prepare(f"{scheme}://{place}/spool"))
    commands(f"{scheme}://{place}/spool")
become()
print(json.dumps(commands(sys.argv[1])))
"""
WORK = """
async def work(url, queues, warm):
    tasks, ran = Tasks(url), []
    if warm:
        await (await tasks.backend()).publish("mine", [Draft(body=b"x")])

    async def run(message):
        ran.append(message.queue)

    for queue in queues:
        tasks.raw_handler(queue=queue)(run)
    worker = Worker(tasks, WorkerOptions(burst=True))
    await worker.run()
    await tasks.aclose()
    return ran

with tempfile.TemporaryDirectory() as place:
    url = sys.argv[1].partition(":")[0] + "://" + place + "/spool"
    asyncio.run(work(url, ["mine"], True))
become()
print(json.dumps(asyncio.run(work(sys.argv[1], ["theirs", "mine"], False))))
"""
SERVE = """
async def serve(url, warm):
    backend = open_backend(url, remote_leases=True)
    app = create_app(backend)
    await app.start()
    if warm:
        await backend.publish("mine", [Draft(body=b"expired")])
    (lease,) = await backend.lease("mine", 1, 0.1)
    again = []

    async def leased_again():
        again.extend(await backend.lease("mine", 1, 30.0))
        return bool(again)

    await wait_until(leased_again)
    await app.stop()
    await backend.aclose()
    return again[0].message.tries

with tempfile.TemporaryDirectory() as place:
    asyncio.run(serve(sys.argv[1].partition(":")[0] + "://" + place + "/spool", True))
become()
print(json.dumps(asyncio.run(serve(sys.argv[1], False))))
"""


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A root of the user, with the queue `mine`, and the queue `theirs`, which only another user may enter."""
    # Not below pytest's directory, which other users cannot enter.
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    scheme: str = request.param
    url = f"{scheme}://{place}/spool"
    subprocess.run([sys.executable, "-c", BECOME + "asyncio.run(prepare(sys.argv[1]))", url], check=True, cwd="/")
    for folder, _, files in os.walk(place / "spool"):
        for one in [Path(folder), *(Path(folder) / name for name in files)]:
            if "theirs" in str(one):
                one.chmod(0o700)
            else:
                os.chown(one, USER, GROUP)
    yield url
    shutil.rmtree(place)


def run_as_user(program: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BECOME + program, url], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_commands_show_a_queue_that_cannot_be_used_with_its_reason(url: str) -> None:
    listed, counted, as_json, examined = json.loads(run_as_user(COMMANDS, url))
    assert listed[:2] == [0, "mine\ntheirs\n"]
    assert listed[2].startswith("queue theirs: ")
    assert "Permission denied" in listed[2]
    assert counted[0] == 0
    lines = {line.split()[0]: line.split() for line in counted[1].splitlines()}
    assert lines["mine"][1] == "1"
    assert lines["theirs"][-3:] == ["cannot", "be", "used"]
    assert "Permission denied" in counted[2]
    rows = {row["queue"]: row for row in json.loads(as_json[1])}
    assert (rows["mine"]["ready"], rows["mine"]["problem"]) == (1, None)
    assert "Permission denied" in rows["theirs"]["problem"]
    assert "theirs" in examined[1]


def test_a_worker_runs_the_messages_of_its_other_queues(url: str) -> None:
    assert run_as_user(WORK, url) == '["mine"]'


def test_a_root_of_mq_moves_the_messages_of_the_other_queues(url: str) -> None:
    root = Path(url.partition("://")[2])
    if not (root / "new").exists():
        # Only mq has a directory for the new messages of all queues.
        assert not url.startswith("mq:")
        return
    for queue in ("theirs", "mine"):
        message = root / "new" / f"{queue}:6a1f0e52-ea0b-11f1-8000-000000000001"
        message.write_text("x")
        os.chown(message, USER, GROUP)
    listed = json.loads(run_as_user(COMMANDS, url))[2]
    assert {row["queue"]: row["ready"] for row in json.loads(listed[1])} == {"mine": 2, "theirs": 0}


def test_a_server_returns_expired_leases_of_the_other_queues(url: str) -> None:
    assert run_as_user(SERVE, url) == "1"
