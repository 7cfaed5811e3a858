"""Texts that programs read change only on purpose: JSON of commands, HTTP responses, pages, log events."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import math
import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import qworker
from qworker import log_events as events
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.health.address import listen
from qworker.health.answers import HealthAnswers
from qworker.health.probe import fetch_page
from qworker.health.server import HealthServer
from qworker.health.worker_report import WorkerReport
from qworker.message import QueueStats
from qworker.testing import FakeClock
from qworker.worker.metrics import TaskCounts
from qworker_memory import MemoryBackend
from tests.support.golden_text import Normal, check, json_of_command
from tests.support.processes import PYTHON, environment
from tests.support.servers import RedisServer, free_port
from tests.support.serving import served
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
URL = "file://./spool?keep_done=all&history=1"
APP = """
from qworker import Fail, Retry, Tasks
tasks = Tasks("file://./spool?keep_done=all&history=1")

@tasks.task(queue="sums", max_tries=2)
async def add(a: int, b: int = 0) -> int:
    return a + b

@tasks.task(queue="sums")
async def refuse() -> None:
    raise Fail("no such account")

@tasks.task(queue="sums")
async def later() -> None:
    raise Retry("not yet", delay=3600)
"""
# Commands, in the order of a story; each prints one document, and none where it fails.
STORY = """
enqueue {app} add 1 --kwargs '{{"b": 2}}' --id sum-1
enqueue {app} refuse --id refuse-1
enqueue {app} later --id later-1
enqueue {app} add 5 --id sum-2 --delay 3600
publish {url} inbox --body hello --id letter-1
publish {url} inbox --body x --id letter-1
publish {url} inbox --lines -f lines
RUN
ls {url}
stats {url}
stats {url} sums
browse {url} sums
browse {url} sums --state failed
browse {url} inbox --limit 1
explain {url} sums sum-1
explain {url} sums refuse-1
explain {url} sums later-1
explain {url} sums sum-2 --app {app}
explain {url} inbox letter-1
explain {url} inbox no-such-id
job {url} sums refuse-1
job {url} sums sum-1 --cancel
schedules {url} put daily -Q sums --task add --every 3600
schedules {url}
schedules {url} remove daily
history {url} sums
history {url} sums --id refuse-1 --all
requeue {url} sums refuse-1
requeue {url} sums no-such-id
pause {url} inbox
explain {url} inbox letter-1
resume {url} inbox
create {url} made
move {url} file://./elsewhere inbox
purge {url} sums --state done --yes
purge {url} nowhere --yes
top {url} --once --interval 0.1
doctor {url}
bench memory: --messages 10
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in os.environ if n.startswith("QWORKER_")]:
        if name != "QWORKER_TEST_GOLDEN":
            monkeypatch.delenv(name)
    return tmp_path


def test_golden_json_of_the_queue_commands(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a message waits long enough to look abandoned.
    monkeypatch.setattr("qworker.tools.explain._ABANDONED_S", math.inf)
    module = f"golden_app_{os.getpid()}"
    (folder / f"{module}.py").write_text(APP)
    (folder / "lines").write_text("one\ntwo\n")
    app = f"{module}:tasks"
    words = {str(folder): "<folder>", module: "<app>", qworker.__version__: "<version>"}
    ends = ("_at", "_age", "_rate", "_s", "position")
    normal = Normal(words, lambda key: key.endswith(ends) or key in ("at", "token", "worker", "next"))
    found: list[Any] = []
    for line in STORY.format(app=app, url=f"'{URL}'").strip().splitlines():
        if line == "RUN":
            subprocess.run(
                [PYTHON, "-m", "qworker", "run", app, "--burst"], check=True, env=environment(), timeout=PATIENCE
            )
            capsys.readouterr()
            continue
        arguments = shlex.split(line)
        # What these say depends on the machine: only the names of fields are the same everywhere.
        prepare = _shape if arguments[0] in ("bench", "doctor") else lambda printed: printed
        one = json_of_command(arguments, normal, capsys, prepare)
        found.append({**one, "command": one["command"].replace(URL, "URL")})
    check("commands", found)


# The same for `qworker rfq`; MESSAGE is the id of the message that is first in the backlog.
RFQ_STORY = """
version
list-topics
publish -t tiles -m '{"tile": "T32U0", "zoom": 3}'
publish -t tiles -m '{"tile": "T32U1"}' --front
publish -t tiles -m '{"tile": ["T32U1"]}'
info
list-topics
list-queue -t tiles
list-queue -t tiles -q nextlog
peek -t tiles -m MESSAGE
peek -t tiles -m 00000000000000000000000000000000
consume -t tiles
LEASE
info
harvest -t tiles
harvest -t tiles
purge-queue -t tiles
info
"""


def test_golden_json_of_the_rfq_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RedisServer(port=free_port()) as server:
        url = f"rfq://127.0.0.1:{server.port}/0"
        normal = Normal({url: "URL", qworker.__version__: "<version>"}, lambda key: key == "redis")
        found: list[Any] = []
        for line in RFQ_STORY.strip().splitlines():
            if line == "LEASE":
                asyncio.run(_leave_a_lease(url))
                continue
            arguments = shlex.split(line)
            if "MESSAGE" in arguments:
                main(["rfq", "list-queue", "-t", "tiles", "--url", url, "--json"])
                arguments[-1] = json.loads(capsys.readouterr().out)[0]
            found.append(json_of_command(["rfq", *arguments, "--url", url], normal, capsys))
    check("rfq", found)


async def _leave_a_lease(url: str) -> None:
    backend = open_backend(url)
    assert len(await backend.lease("tiles", 1, 60.0)) == 1
    await backend.aclose()


def _shape(value: Any) -> Any:
    """The names of fields, and the kinds of their values; of a list, the different ones."""
    if isinstance(value, dict):
        return {name: _shape(one) for name, one in sorted(value.items())}
    if isinstance(value, list):
        shapes = {json.dumps(_shape(one), sort_keys=True) for one in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    return f"<{type(value).__name__}>"


HELLO = base64.b64encode(b"hello").decode()
# Method, path, body and headers, in the order of a story; {token} is that of the lease before.
REQUESTS: list[tuple[str, str, Any, dict[str, str]]] = [
    ("GET", "/inbox", None, {}),
    ("PUT", "/inbox", None, {}),
    ("GET", "/inbox", None, {}),
    ("GET", "/inbox/messages", None, {}),
    ("POST", "/inbox/messages", b"mq", {}),
    ("GET", "/inbox/messages", None, {}),
    ("DELETE", "/inbox/messages/no-such-id", None, {}),
    ("GET", "/-/about", None, {}),
    ("GET", "/-/queues", None, {}),
    ("GET", "/-/openapi.json", None, {}),
    ("POST", "/-/work/publish", [{"body": HELLO, "id": f"m{n}", "headers": {"task": "add"}} for n in range(6)], {}),
    ("POST", "/-/work/publish", [{"body": HELLO, "delay": 60.0, "id": "later"}], {}),
    ("POST", "/-/work/publish", [{"body": 1}], {}),
    ("GET", "/-/work/messages/m0", None, {}),
    ("GET", "/-/work/messages/none", None, {}),
    ("POST", "/-/work/lease?visibility_timeout=30", None, {}),
    ("PATCH", "/-/work/messages/m0?visibility_timeout=60", None, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/messages/m0/ack", {}, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/messages/m0/ack", {}, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/lease?visibility_timeout=30", None, {}),
    ("POST", "/-/work/messages/m1/retry", {"delay": 5.0, "error": "not yet"}, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/lease?visibility_timeout=30", None, {}),
    ("POST", "/-/work/messages/m2/fail", {"error": "never"}, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/lease?visibility_timeout=30", None, {}),
    ("POST", "/-/work/messages/m3/release", {}, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/messages/m3/eat", {}, {"X-Lease-Token": "{token}"}),
    ("POST", "/-/work/lease?visibility_timeout=30", None, {}),
    (
        "POST",
        "/-/settle",
        [{"lease": {"queue": "work", "id": "m3", "token": "{token}"}, "action": "ack", "delay": 0.0, "error": None}],
        {},
    ),
    ("POST", "/-/work/lease?visibility_timeout=30", None, {}),
    (
        "POST",
        "/-/extend",
        {"leases": [{"queue": "work", "id": "m4", "token": "{token}"}], "visibility_timeout": 90.0},
        {},
    ),
    ("GET", "/-/work/browse?state=failed", None, {}),
    ("GET", "/-/work/browse?state=delayed", None, {}),
    ("GET", "/-/work/browse?state=eaten", None, {}),
    ("GET", "/-/work/stats", None, {}),
    ("POST", "/-/work/requeue", {"state": "failed"}, {}),
    ("POST", "/-/work/remove", {"ids": ["m2"]}, {}),
    ("POST", "/-/work/pause", None, {}),
    ("GET", "/-/stats", None, {}),
    ("POST", "/-/work/resume", None, {}),
    ("POST", "/-/work/reap", None, {}),
    ("POST", "/-/wait", {"queues": ["work"], "timeout": 0.0}, {}),
    ("GET", "/-/work/messages/m1/history", None, {}),
    ("GET", "/-/-history", None, {}),
    ("POST", "/-/work/remove", {"state": "ready"}, {}),
    ("GET", "/-/nowhere/stats", None, {}),
    ("DELETE", "/inbox", None, {}),
    ("GET", "/-/no/such/page", None, {}),
]


def test_golden_answers_over_http() -> None:
    found: list[Any] = []
    token = "0"
    with served(MemoryBackend("golden", clock=FakeClock(), history=True)) as server:
        normal = Normal(
            {server.url: "<server>", qworker.__version__: "<version>"},
            lambda key: key.endswith(("_at", "_age", "-expires", "position", "token")),
        )
        for method, path, body, headers in REQUESTS:
            given = body if isinstance(body, bytes | None) else _with_token(body, token)
            sent = {name: value.format(token=token) for name, value in headers.items()}
            request = urllib.request.Request(f"{server.url}{path}", given, sent, method=method)
            status, kept, content = _answer(request)
            document = _document(content)
            if path.endswith("openapi.json"):
                document = {"info": document["info"], "paths": document["paths"]}
            if "/lease" in path and isinstance(document, list):
                token = str(document[0]["token"])
            found.append(
                {
                    "request": f"{method} {path}",
                    "status": status,
                    "headers": normal.value(kept),
                    "answer": normal.value(document),
                }
            )
    check("http", found)


def _with_token(body: Any, token: str) -> bytes:
    return json.dumps(body).replace('"{token}"', token).encode()


def _answer(request: urllib.request.Request) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            status, headers, content = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        status, headers, content = error.code, error.headers, error.read()
    return status, {name: value for name, value in sorted(headers.items()) if name.lower().startswith("x-")}, content


def _document(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()


def test_golden_pages_of_the_health_port() -> None:
    queues = [
        QueueStats(queue="a.b", ready=3, leased=2, oldest_age_s=1.5),
        QueueStats(queue="off", ready=9, paused=True),
    ]
    cell = TaskCounts("a.b", "resize", acked=5, retried=2, failed=1, released=1, lost=1, seconds=2.5, attempts=3)
    report = WorkerReport(
        pid=1, life="1-1", state="working", concurrency=10, running=2, counts=[cell], queues=queues, looked_at=1.0
    )
    found: dict[str, Any] = {}
    view = HealthAnswers(lambda: [report], stall_timeout=60.0, own_metrics=True)
    with closing(HealthServer(listen(("127.0.0.1", 0)), view)) as server:
        for path in ("/livez", "/readyz", "/stats", "/metrics"):
            status, text = fetch_page(f"127.0.0.1:{server.port}", path, PATIENCE)
            found[path] = {"status": status, "answer": _lines(path, text)}
    check("health", found)


def _lines(path: str, text: str) -> Any:
    normal = Normal({}, lambda key: key == "stats_age_s")
    if path == "/stats":
        return normal.value(json.loads(text))
    # A process measures itself: the names are the same everywhere.
    own = re.compile(r"^((?:process|python)_\S+) \S+$", re.MULTILINE)
    text = own.sub(r"\1 <number>", re.sub(r"(python_info)\{.*", r"\1", text))
    return re.sub(r"^(\S*stats_age\S*) \S+$", r"\1 <number>", text, flags=re.MULTILINE).splitlines()


LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def test_golden_log_events_and_their_fields() -> None:
    found = {
        str(path.relative_to(ROOT)): calls
        for top in ("qworker", "backends")
        for path in sorted((ROOT / top).rglob("*.py"))
        if (calls := [line for node in ast.walk(ast.parse(path.read_text())) for line in _log_call(node)])
    }
    assert sum(map(len, found.values())) > 50
    # Also of calls that get an event from elsewhere.
    words = {name: word for name, word in vars(events).items() if name.isupper()}
    check("log_events", {"words": words, "calls": found})


def _log_call(node: ast.AST) -> list[str]:
    """A call of a logger: its level, its event, and the fields that it gives."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
        return []
    if "log" not in ast.unparse(node.func.value).lower():
        return []
    fields = [field for given in node.keywords for field in _fields(given)]
    return [" ".join([node.func.attr, *map(_word, node.args), *fields])]


def _fields(given: ast.keyword) -> list[str]:
    if given.arg is not None:
        return [given.arg]
    if isinstance(given.value, ast.Dict):
        return [_word(key) for key in given.value.keys if key is not None]
    return [f"**{ast.unparse(given.value)}"]


def _word(node: ast.expr) -> str:
    """A text as it is logged, where it is a constant."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "events":
        return repr(vars(events)[node.attr])
    return ast.unparse(node)
