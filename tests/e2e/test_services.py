"""The examples of web services, run as their READMEs say."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.processes import environment, started
from tests.support.waiting import PATIENCE, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    copy = tmp_path / request.param
    shutil.copytree(EXAMPLES / request.param, copy, ignore=shutil.ignore_patterns("__pycache__", "spool", "*.sqlite3"))
    return copy


def ask(base: str, method: str, path: str) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=PATIENCE)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize("folder", ["starlette_service"], indirect=True)
def test_a_starlette_service_enqueues_and_works_and_drains(folder: Path) -> None:
    with started(folder, "app:app", "--port", "0", program=("-m", "uvicorn")) as process:
        base = process.line("Uvicorn running on").split("running on ")[1].split()[0]
        names = [f"guest{number}" for number in range(20)]
        for name in names:
            status, answer = ask(base, "POST", f"/greetings/{name}")
            assert (status, set(answer)) == (202, {"id"})
        for name in names:
            wait_for(lambda n=name: ask(base, "GET", f"/greetings/{n}")[0] == 200, name, lambda: process.text)
        assert ask(base, "GET", "/greetings/guest0")[1] == {"greeting": "Hello, guest0!"}
        assert ask(base, "POST", "/greetings/..")[0] in {400, 404}
        assert ask(base, "GET", "/livez") == (200, {"worker": "working"})
        process.signal(signal.SIGTERM)
        # uvicorn ends by the signal that it was told to end by.
        assert process.end() in {0, -signal.SIGTERM}, process.text
        assert "Application shutdown complete" in process.text
    assert not [
        p for state in ("queue", "lease", "delay", "fail") for p in (folder / "spool/default" / state).glob("*")
    ]


# Requests without a server: the views, their transactions and their signals are the real ones.
REQUESTS = """
import app
from django.test import Client
client = Client(SERVER_NAME="localhost")
created = client.post("/orders", {"item": "tea"})
assert created.status_code == 201, created.content
refused = client.post("/orders", {"item": ""})
assert refused.status_code == 400, refused.content
print(created.json()["id"])
"""
LOOK = """
import app
from django.test import Client
print(Client(SERVER_NAME="localhost").get("/orders/1").content.decode())
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("folder", ["django_service"], indirect=True)
def test_a_django_shop_enqueues_what_is_committed_and_nothing_else(folder: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("manage.py", "migrate", "--run-syncdb", "-v", "0")
    assert run("-c", REQUESTS) == "1\n"
    # The order that was rolled back has left nothing.
    assert len(list((folder / "spool/default/queue").glob("*"))) == 1
    assert json.loads(run("-c", LOOK)) == {"item": "tea", "confirmed": False}
    run("manage.py", "runworker", "--burst")
    assert json.loads(run("-c", LOOK)) == {"item": "tea", "confirmed": True}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("folder", ["django_service"], indirect=True)
def test_the_shops_management_command_is_a_worker_that_drains(folder: Path) -> None:
    with started(folder, "runworker", "-w", "2", program=("manage.py",)) as process:
        process.event("worker_started", 2)
        assert process.drain() == 0, process.text
