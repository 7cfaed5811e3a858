"""Webhooks: an outbox in the database, whose events reach each endpoint in their order."""

from __future__ import annotations

import sqlite3
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from qworker import Backoff, Context, Retry, Tasks, Unique

TABLE = "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, endpoint TEXT, body TEXT, sent INTEGER DEFAULT 0)"

tasks = Tasks("file://./spool/webhooks")


@contextmanager
def transaction() -> Generator[sqlite3.Connection]:
    """Open the database, and commit at the end of the block. An exception rolls back."""
    database = sqlite3.connect("outbox.sqlite", timeout=60)
    try:
        with database:
            database.execute(TABLE)
            yield database
    finally:
        database.close()


def add_event(database: sqlite3.Connection, endpoint: str, body: str) -> None:
    """Add an event to the outbox, in the transaction that changes the data of your program."""
    database.execute("INSERT INTO events (endpoint, body) VALUES (?, ?)", (endpoint, body))


def emit(endpoint: str, body: str) -> None:
    """Add an event, and send it after the commit."""
    with transaction() as database:
        add_event(database, endpoint, body)
    deliver.enqueue_sync(endpoint)


# One call for each endpoint waits or runs, so the events of an endpoint are sent one after the other.
@tasks.task(unique=Unique(by=("endpoint",)), max_tries=None, retry=Backoff(initial=1, maximum=600))
def deliver(ctx: Context, endpoint: str) -> None:
    """Send the events of an endpoint. One that cannot be sent is tried again before the next one is sent."""
    while event := next_event(endpoint):
        number, body = event
        if ctx.cancelled():
            raise Retry(f"stopped at event {number}", delay=0, counts=False)
        post(endpoint, number, body)
        # If the worker is killed here, the event is sent again. Its number lets the receiver ignore the second one.
        with transaction() as database:
            database.execute("UPDATE events SET sent = 1 WHERE id = ?", (number,))


def next_event(endpoint: str) -> tuple[int, str] | None:
    """Return the number and the body of the first event that is not sent."""
    query = "SELECT id, body FROM events WHERE endpoint = ? AND NOT sent ORDER BY id LIMIT 1"
    with transaction() as database:
        event: tuple[int, str] | None = database.execute(query, (endpoint,)).fetchone()
    return event


def post(endpoint: str, number: int, body: str) -> None:
    """Send an event. A status of 400 or more raises an error."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": str(number)}
    request = urllib.request.Request(endpoint, body.encode(), headers)
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        error.close()  # It is the response.
        raise


@tasks.every(timedelta(seconds=10), overlap="skip")
@tasks.task
def deliver_forgotten() -> None:
    """Wake the endpoints that have events, because `emit` may have been killed after its commit.

    Or the event came when the call before it had read its last event and still had the unique key.
    """
    with transaction() as database:
        endpoints = database.execute("SELECT DISTINCT endpoint FROM events WHERE NOT sent").fetchall()
    tasks.enqueue_many_sync([deliver.call(endpoint) for (endpoint,) in endpoints])


if __name__ == "__main__":
    emit(*sys.argv[1:])
