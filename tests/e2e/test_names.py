"""Real workers: two apps on a queue, two versions of an app, a library's tasks, imports, and late URLs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import PYTHON, Process, environment, started
from tests.support.servers import RedisServer

SAY = """
import os, time
from qworker import Tasks

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture(params=["file", "redis"])
def url(request, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/spool"
    else:
        with RedisServer() as server:
            yield server.url


def write(folder: Path, **modules: str) -> None:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(SAY + text)


def python(folder: Path, code: str, **env: str) -> str:
    done = subprocess.run(
        [PYTHON, "-c", code],
        cwd=folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def worker(folder: Path, app: str, *options: str, **env: str):
    return started(folder, "run", app, "--log-format", "json", *options, env=env)


def ready(*workers: Process) -> None:
    for each in workers:
        each.event("worker_started")


@pytest.mark.parametrize("concurrency", ["1", "100"])
def test_two_apps_on_one_queue_hardly_slow_each_other(tmp_path, url, concurrency):
    app = """
tasks = Tasks()
@tasks.task(name="{name}.work")
async def work(at: float, n: int) -> None:
    say("ran", "{name}", n, time.time() - at)
"""
    write(tmp_path, a=app.format(name="a"), b=app.format(name="b"))
    options = ("-c", concurrency)
    with (
        worker(tmp_path, "a:tasks", *options, QWORKER_URL=url) as first,
        worker(tmp_path, "b:tasks", *options, QWORKER_URL=url) as second,
    ):
        ready(first, second)
        publish = "import time, a, b\nfor n in range(12): (a, b)[n % 2].work.enqueue_sync(time.time(), n)"
        python(tmp_path, publish, QWORKER_URL=url)
        for each in (first, second):
            each.line("ran ", 6)
        delays = [float(line.split()[-1]) for each in (first, second) for line in each.lines if line.startswith("ran ")]
        assert len(delays) == 12
        # Not 10 or 20 s as if each release lasted 10 s. On an idle machine it is less than 1 s.
        assert sorted(delays)[8] < 5.0
        for each in (first, second):
            for hint in each.events("unknown_task"):
                assert "give each app its own queue" in hint["hint"]


OLD = """
tasks = Tasks()
@tasks.task(max_tries=1)
def pay(order: int) -> None:
    say("old", order)
"""
NEW = """
tasks = Tasks()
@tasks.task(max_tries=1)
def pay(order: int, currency: str) -> None:
    say("new", order, currency)
"""


def test_a_signature_changes_in_a_rolling_deploy_in_both_directions_and_nothing_fails(tmp_path, url):
    write(tmp_path, old=OLD, new=NEW)
    # New publishers first: the old worker, alone, refuses their calls.
    with worker(tmp_path, "old:tasks", QWORKER_URL=url) as old:
        ready(old)
        python(tmp_path, "import new\nfor n in range(5): new.pay.enqueue_sync(n, 'EUR')", QWORKER_URL=url)
        old.event("message_released", 5)
        # Then both versions work, and old publishers go on.
        with worker(tmp_path, "new:tasks", QWORKER_URL=url) as new:
            ready(new)
            python(tmp_path, "import old\nfor n in range(5): old.pay.enqueue_sync(n)", QWORKER_URL=url)
            new.line("new ", 5)
            old.line("old ", 5)
            for each in (old, new):
                assert not each.events("message_failed")
                assert not each.events("message_retried")
            assert new.drain() == 0
        assert old.drain() == 0


def test_calls_of_a_version_that_never_comes_back_fail_after_their_time(tmp_path, url):
    write(tmp_path, old=OLD, new=NEW.replace("Tasks()", "Tasks(unknown_for=0.5)"))
    python(tmp_path, "import old; old.pay.enqueue_sync(1)", QWORKER_URL=url)
    with worker(tmp_path, "new:tasks", QWORKER_URL=url) as new:
        assert "missing a required argument: 'currency'" in new.event("message_failed")["error"]
        assert new.event("message_failed")["tries"] == 0


def test_imports_are_imported_by_workers_and_their_processes_and_not_by_publishers(tmp_path, url):
    write(
        tmp_path,
        app='tasks = Tasks(imports=["heavy"])\n',
        heavy="""
from app import tasks
say("heavy is imported in", os.getpid())

@tasks.task
async def light() -> None:
    say("light ran")
    await big.enqueue()

@tasks.task(process=True)
def big() -> None:
    say("big ran", sorted(tasks.registered_tasks))
    tasks.named("last").enqueue_sync()

@tasks.task
def last() -> None:
    say("last ran")
""",
    )
    said = python(tmp_path, "from app import tasks; tasks.named('light').enqueue_sync()", QWORKER_URL=url)
    assert "heavy" not in said
    with started(tmp_path, "enqueue", "app:tasks", "light", env={"QWORKER_URL": url}) as refused:
        assert refused.end() == 2
        assert "`qworker run` also imports heavy" in refused.text
        assert "heavy is imported" not in refused.text
    with worker(tmp_path, "app:tasks", QWORKER_URL=url) as run:
        assert run.line("big ran") == "big ran ['big', 'last', 'light']"
        run.line("last ran")
        assert run.drain() == 0
    (tmp_path / "heavy.py").unlink()
    with worker(tmp_path, "app:tasks", QWORKER_URL=url) as missing:
        assert missing.end() == 2
        assert "no module 'heavy'" in missing.text


def test_a_library_is_included_and_its_processes_enqueue_to_the_store_of_the_app(tmp_path, url):
    write(
        tmp_path,
        lib="""
tasks = Tasks()

@tasks.task(process=True)
def clean(n: int) -> None:
    say("clean", clean.name, n)
    report.enqueue_sync(n)

@tasks.task
async def report(n: int) -> None:
    say("report", report.name, n)
""",
        app="""
import lib
tasks = Tasks()
tasks.include(lib.tasks, prefix="lib.", queue="lib")
""",
        wsgi="""
from app import tasks
tasks.url = os.environ["LATE_URL"]
""",
    )
    python(tmp_path, "import wsgi, lib; lib.clean.enqueue_sync(1)", LATE_URL=url)
    # The URL is in no argument of a process: the child gets it from its parent.
    with worker(tmp_path, "wsgi:tasks", "--isolated", "1", LATE_URL=url) as run:
        assert run.line("report ") == "report lib.report 1"
        assert run.line("clean ") == "clean lib.clean 1"
        commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_child(path, run.pid)]
        assert commands
        assert not any(url.encode() in command for command in commands)
        assert run.drain() == 0


def is_child(path: Path, parent: int) -> bool:
    try:
        return int((path.parent / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def test_a_url_on_the_command_line_counts_in_processes_of_handlers_too(tmp_path, url):
    write(
        tmp_path,
        app="""
tasks = Tasks("file://./never-made")

@tasks.task(process=True)
def begin() -> None:
    finish.enqueue_sync()

@tasks.task
async def finish() -> None:
    say("finished")
""",
    )
    code = f"from app import *; tasks.url = {url!r}; begin.enqueue_sync()"
    python(tmp_path, code)
    with worker(tmp_path, "app:tasks", "--url", url) as run:
        run.line("finished")
    assert not (tmp_path / "never-made").exists()
