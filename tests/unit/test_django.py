"""`qworker.django` with the real Django: calls that are sent after the commit, and connections of handlers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import django
from django.conf import settings

settings.configure(
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "one.sqlite"},
        "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": "other.sqlite"},
    } if sys.argv[1] == "yes" else {},
)
django.setup()
from django.db import close_old_connections, connection, transaction
from qworker import Tasks
from qworker.errors import NotSupported, UsageError
from qworker.django import FreshConnections, enqueue_on_commit
import asyncio

tasks = Tasks("file://./spool", hooks=[FreshConnections()])
seen = []

@tasks.task
def send(order):
    with connection.cursor() as cursor:
        # A row is always committed before its call runs.
        assert cursor.execute("SELECT 1 FROM orders WHERE id = %s", [order]).fetchone(), order
    seen.append(order)

def insert(number):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (%s)", [number])

def waiting():
    return sorted(job.id for job in tasks.jobs_sync(task="send"))

if sys.argv[1] == "no":
    try:
        enqueue_on_commit(send, 1)
    except UsageError as error:
        sys.exit(str(error))

with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE orders (id INTEGER)")

with transaction.atomic():
    insert(1)
    job = enqueue_on_commit(send, 1)
    assert job.existed is None and job.queue == "default"
    assert waiting() == [], "nothing is sent before the commit"
    with transaction.atomic():
        insert(2)
        given = enqueue_on_commit(send.using(id="order-2"), 2)
    try:
        with transaction.atomic():
            enqueue_on_commit(send, 3)
            raise KeyError
    except KeyError:
        pass
assert waiting() == sorted([job.id, "order-2"]), "a savepoint that is rolled back drops its calls"
assert given.id == "order-2"

try:
    with transaction.atomic():
        enqueue_on_commit(send.call(4))
        raise KeyError
except KeyError:
    pass
assert len(waiting()) == 2, "a rollback drops the call"

insert(5)
enqueue_on_commit(send, 5)
assert len(waiting()) == 3, "without a transaction it is sent at once"

with transaction.atomic():
    insert(6)
    # The other database has no transaction.
    enqueue_on_commit(send.call(6), database="other")
    assert len(waiting()) == 4

for wrong in ((len, 1), (send.call(1), 2), (send,)):
    try:
        enqueue_on_commit(*wrong)
    except UsageError as error:
        print(error)
    else:
        raise AssertionError("it is refused at the call")

try:
    enqueue_on_commit(send.call(1), database="typo")
except UsageError as error:
    print(error)

# After the commit it would be too late for a refusal.
def another(order): ...

for url in ("vsqs://./vsqs", "fsq://./fsq", "mq://./mq"):
    other = Tasks(url).task(another)
    for refused in (other, other.using(priority=9, id="0f8fad5b-d9cb-469f-a165-70867728950e")):
        try:
            with transaction.atomic():
                enqueue_on_commit(refused, 1)
                seen.append(url)
        except NotSupported as error:
            print(error)

from qworker.worker import Worker, WorkerOptions
asyncio.run(Worker(tasks, WorkerOptions(burst=True)).run())
assert sorted(seen) == [1, 2, 5, 6], seen
"""


def _run(folder: Path, databases: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM, databases]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_calls_are_sent_after_the_commit_and_dropped_by_rollbacks_and_savepoints(tmp_path: Path) -> None:
    done = _run(tmp_path, "yes")
    assert done.returncode == 0, done.stderr
    assert "enqueue_on_commit takes a task or a call (got <built-in function len>)" in done.stdout
    assert "django: DATABASES has no 'typo': give database= one of its names" in done.stdout
    assert "vsqs: does not support enqueue_on_commit, because its publisher cannot know the id (" in done.stdout
    assert "mq: does not support priorities (" in done.stdout


def test_without_a_database_the_call_is_refused_in_one_line(tmp_path: Path) -> None:
    done = _run(tmp_path, "no")
    assert done.stderr.splitlines()[-1] == "django: enqueue_on_commit needs a database connection: set DATABASES"
