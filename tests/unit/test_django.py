"""`qworker.django` with the real Django: calls that are sent after the commit, and connections of handlers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging
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
from django.test import TestCase
from unittest import TextTestRunner
from django.db import close_old_connections, connection, transaction
from qworker import Tasks
from qworker.errors import EnqueueFailed, InvalidArguments, MessageTooLarge, NotSupported, QueueFull, UsageError
from qworker.django import FreshConnections, enqueue_on_commit
import asyncio

tasks = Tasks("file://./spool?max_body=1KiB", hooks=[FreshConnections()])
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

# One hook sends the calls of a transaction. It changes neither their order nor that of the hooks of other code.
from qworker_file import FileBackend

order = []
publish = FileBackend.publish

async def note(self, queue, drafts):
    order.append(len(drafts))
    return await publish(self, queue, drafts)

FileBackend.publish = note
with transaction.atomic():
    for number in (7, 8):
        insert(number)
        enqueue_on_commit(send, number)
    transaction.on_commit(lambda: order.append("hook"))
    insert(9)
    with transaction.atomic():
        enqueue_on_commit(tasks.named("send"), 9)
    assert len(connection.run_on_commit) == 3
assert order == [2, "hook", 1], order

# The transaction is committed, so an error of the store stops no other hook, and is logged.
async def fail(self, queue, drafts):
    if queue == "full":
        raise QueueFull("no room")
    return await publish(self, queue, drafts)

FileBackend.publish = fail
logging.basicConfig(stream=sys.stdout)
with transaction.atomic():
    insert(10)
    lost = enqueue_on_commit(send.using(queue="full"), 10)
    sent = enqueue_on_commit(send, 10)
    transaction.on_commit(lambda: order.append("next"))
assert (lost.existed, sent.existed, order[-1]) == (None, False, "next")
print("lost:", lost.id)
try:
    enqueue_on_commit(send.using(queue="full"), 10)
except EnqueueFailed as error:
    print(error)
FileBackend.publish = publish

# Tests see the calls of their block, also if the transaction of the test has earlier ones.
for number in (11, 12, 13):
    insert(number)

class CaptureTest(TestCase):
    def test_a_block_captures_its_own_calls(self):
        early = enqueue_on_commit(send, 1)
        for numbers in ([11, 12], [13]):
            with self.captureOnCommitCallbacks(execute=True) as hooks:
                jobs = [enqueue_on_commit(send, number) for number in numbers]
            assert len(hooks) == len(numbers)
            assert [job.existed for job in jobs] == [False] * len(jobs)
        with self.captureOnCommitCallbacks() as hooks, transaction.atomic():
            jobs = [enqueue_on_commit(send, number) for number in (1, 2)]
        assert (len(hooks), early.existed, jobs[0].existed) == (1, None, None)

assert TextTestRunner(stream=sys.stdout).run(CaptureTest("test_a_block_captures_its_own_calls")).wasSuccessful()

for wrong, kind in (((send, 1, 2), InvalidArguments), ((send, "x" * 1024), MessageTooLarge)):
    try:
        with transaction.atomic():
            enqueue_on_commit(*wrong)
            seen.append("it is refused at the call")
    except kind:
        pass

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
assert sorted(seen) == [1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13], seen
"""


def _run(folder: Path, databases: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", PROGRAM, databases]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_calls_are_sent_after_the_commit_and_dropped_by_rollbacks_and_savepoints(tmp_path: Path) -> None:
    done = _run(tmp_path, "yes")
    assert done.returncode == 0, done.stderr
    assert "enqueue_on_commit takes a task or a call (got <built-in function len>)" in done.stdout
    assert "django: DATABASES has no 'typo': give database= one of its names" in done.stdout
    assert "vsqs: does not support calls that are sent later, because it does not take their ids (" in done.stdout
    lost = re.findall("^lost: (.*)$", done.stdout, re.MULTILINE)
    assert f"calls were not enqueued after the commit, or it is not known: {lost[0]}\nTraceback" in done.stdout
    assert done.stdout.count("1 of 1 calls may not be stored (queue 'full': no room)") == 1
    assert done.stdout.count("1 of 2 calls may not be stored (queue 'full': no room)") == 1
    assert "mq: does not support priorities (" in done.stdout


def test_without_a_database_the_call_is_refused_in_one_line(tmp_path: Path) -> None:
    done = _run(tmp_path, "no")
    assert done.stderr.splitlines()[-1] == "django: enqueue_on_commit needs a database connection: set DATABASES"
