"""Programs that the fault tests run, stop and kill. Each speaks to the tests through a ledger that lives outside of it.

    python programs.py publish URL LEDGER COUNT BATCH      publish numbered messages; log each before and after
    python programs.py hold URL LEDGER COUNT               publish messages under the same held ids in every process
    python programs.py work URL LEDGER [CONCURRENCY]       work until the queue is empty; log each message that ran
    python programs.py ack URL LEDGER                      lease and ack for ever; log each message that ran or is acked
    python programs.py cells URL LEDGER FIRST              change cells, from a number on; log each before and after
    python programs.py unique URL LEDGER                   publish, lease and end messages with unique keys
    python programs.py replace URL LEDGER                  replace a waiting message with a unique key
    python programs.py app_key URL LEDGER                  publish a message with a key that counts in all queues
    python programs.py contend URL LEDGER                  publish messages with one unique key for ever
    python programs.py cancel URL LEDGER                   cancel all messages; log each that is cancelled
    python programs.py make_due URL LEDGER                 publish a delayed message and make it due
    python programs.py bulk URL LEDGER PARTS ROWS          stage, seal and publish a job
    python programs.py take URL LEDGER                     lease and ack until nothing is ready
    python programs.py move URL LEDGER                     reap until nothing of a sealed load is staged
    python programs.py watch URL LEDGER                    reap, lease and ack for ever; log each round and each message

A number is written to `attempted` before its publish, to `acked` after the publish has returned, and to `finished` when
its handler runs. Lines are appended by single writes to files opened with O_APPEND: what a program wrote before it died
is there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import qworker.bulk
from qworker import Context, Draft, Message, Tasks
from qworker.backend import Backend
from qworker.backend.offers import OffersDue
from qworker.backend.registry import open_backend
from qworker.bulk.contract import StagedPartition
from qworker.cell import Cell, CellAction, CellOp
from qworker.errors import BackendError
from qworker.message import Selection, SettleAction, Settlement, State
from qworker.unique import Unique
from qworker.worker import Worker, WorkerOptions
from tests.support.pending import pending

QUEUE = "work"
OTHER = "other"
APP_KEY = Unique(scope="app")
# Long enough that a slow machine loses no live lease; what a dead process held comes back by its life sign.
VISIBILITY = 30.0


class Ledger:
    """Append-only files of lines."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, int] = {}

    def write(self, book: str, *lines: object) -> None:
        if not lines:
            return
        if book not in self._files:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._files[book] = os.open(self._folder / book, flags, 0o644)
        os.write(self._files[book], "".join(f"{line}\n" for line in lines).encode())

    def read(self, book: str) -> list[str]:
        path = self._folder / book
        return path.read_text().split() if path.exists() else []


async def publish(url: str, ledger: Ledger, count: int, batch: int) -> None:
    """Publish `count` messages in batches, each batch again under the same ids until the store has said yes."""
    backend = open_backend(url)
    await backend.open()
    me = f"p{os.getpid()}"
    for first in range(0, count, batch):
        names = [f"{me}-{n}" for n in range(first, min(first + batch, count))]
        ledger.write("attempted", *names)
        drafts = [Draft(body=name.encode(), id=name) for name in names]
        await _until_stored(backend, drafts, ledger)
        ledger.write("acked", *names)
    await backend.aclose()


async def hold(url: str, ledger: Ledger, count: int) -> None:
    """Publish messages whose ids are the same in every process, and stay taken."""
    backend = open_backend(url)
    await backend.open()
    names = [f"held-{n}" for n in range(count)]
    ledger.write("attempted", *names)
    for name in names:
        await _until_stored(backend, [Draft(body=name.encode(), id=name, hold=1e6)], ledger)
        ledger.write("acked", name)
    await backend.aclose()


async def _until_stored(backend: Backend, drafts: list[Draft], ledger: Ledger) -> None:
    await _until_done(lambda: backend.publish(QUEUE, drafts), ledger)


async def _until_done(call: Callable[[], Awaitable[object]], ledger: Ledger) -> None:
    for attempt in range(100):
        try:
            await call()
        except BackendError as error:
            ledger.write("errors", f"{type(error).__name__}")
            await asyncio.sleep(0.01 * min(attempt, 10))
        else:
            return
    raise SystemExit("the store never said yes")


# The changes of the program `cells`: what is done to which cell, and the version that it must have, if any.
CHANGES: list[tuple[CellAction, str, str | None]] = [
    ("put", "a", ""),
    ("put", "b", None),
    ("put", "a", None),
    ("put", "a", "current"),
    ("delete", "b", None),
    ("close", "", None),
    ("delete", "a", "current"),
    ("close", "", None),
    ("put", "a", None),
    ("put", "b", ""),
    ("put", "a", "current"),
]


def cell_value(number: int) -> bytes:
    """The value that the change of a number puts: whole if its last bytes are there."""
    return b"%d:%b:%d" % (number, b"x" * 5000, number)


async def cells(url: str, ledger: Ledger, first: int) -> None:
    """Make changes to two cells of a group, each again until the store has said yes."""
    backend = open_backend(url)
    await _until_done(lambda: backend.create(QUEUE), ledger)
    for number in range(first, len(CHANGES)):
        ledger.write("attempted", number)
        await _until_done(lambda number=number: make_change(backend, number, *CHANGES[number]), ledger)
        ledger.write("acked", number)
    await backend.aclose()


async def make_change(backend: Backend, number: int, do: CellAction, name: str, only: str | None) -> None:
    """Make one change."""
    if only == "current":
        (found,) = await backend.cells(QUEUE, [CellOp("get", Cell("g", name))])
        only = None if found.cell is None else found.cell.version
    await backend.cells(QUEUE, [CellOp(do, Cell("g", name, cell_value(number), ttl=1e6 if number % 2 else None), only)])


async def unique(url: str, ledger: Ledger) -> None:
    """Let a message with a unique key end in each way, and publish the key again in between."""
    backend = open_backend(url)
    await _end_with_key(backend, ledger, 0, SettleAction.ACK, None)
    started = Unique(until="started")
    stored = await _end_with_key(backend, ledger, 1, SettleAction.FAIL_PERM, started)
    await backend.requeue(QUEUE, Selection(state=State.FAILED))
    assert await backend.publish(QUEUE, [Draft(body=b"1", unique_key="k", unique=started)]) == [stored]
    await backend.cancel(QUEUE, Selection(ids=[stored]))
    await backend.aclose()


async def replace(url: str, ledger: Ledger) -> None:
    """Put a delayed message in the place of the one that waits with the unique key."""
    backend = open_backend(url)
    later = Unique(again="debounce", wait=1e6)
    ledger.write("acked", *await backend.publish(QUEUE, [Draft(body=b"new", unique_key="k", unique=later)]))
    await backend.aclose()


async def app_key(url: str, ledger: Ledger) -> None:
    """Publish a message with a key that counts in all queues."""
    backend = open_backend(url)
    ledger.write("acked", *await backend.publish(OTHER, [Draft(body=b"x", unique_key="k", unique=APP_KEY)]))
    await backend.aclose()


async def _end_with_key(backend: Backend, ledger: Ledger, number: int, how: SettleAction, unique: Unique | None) -> str:
    draft = Draft(body=b"%d" % number, unique_key="k", unique=unique)
    ledger.write("attempted", number)
    (stored,) = await backend.publish(QUEUE, [draft])
    assert await backend.publish(QUEUE, [draft]) == [stored]
    ledger.write("acked", number)
    leases = await backend.lease(QUEUE, 10, VISIBILITY)
    await backend.settle([Settlement(lease=lease, action=how) for lease in leases])
    return stored


async def contend(url: str, ledger: Ledger) -> None:
    """Publish messages with one unique key for ever."""
    backend = open_backend(url)
    while True:
        (stored,) = await backend.publish(QUEUE, [Draft(body=b"x", unique_key="k")])
        ledger.write("acked", stored)
        await backend.wait(["idle"], 0.2)


def make_tasks(url: str, ledger: Ledger) -> Tasks:
    tasks = Tasks(url)

    @tasks.raw_handler(queue=QUEUE, max_tries=1000)
    async def on_message(ctx: Context, message: Message) -> None:
        await asyncio.sleep(0)
        ledger.write("finished", message.body.decode())
        ledger.write("tokens", f"{message.id}:{ctx.token}")

    return tasks


async def work(url: str, ledger: Ledger, concurrency: int = 10) -> None:
    """Work until nothing is ready or leased."""
    options = WorkerOptions(queues=(QUEUE,), concurrency=concurrency, visibility_timeout=VISIBILITY, burst=True)
    await Worker(make_tasks(url, ledger), options).run()


async def watch(url: str, ledger: Ledger) -> None:
    """Do what a worker's loops do to a store, in rounds that can be counted."""
    backend = open_backend(url)
    while True:
        await backend.reap(QUEUE)
        leases = await backend.lease(QUEUE, 10, VISIBILITY)
        ledger.write("finished", *(lease.message.body.decode() for lease in leases))
        await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
        ledger.write("reaps", 1)
        await backend.wait([QUEUE], 0.2)


async def ack(url: str, ledger: Ledger) -> None:
    """Run messages, and log to `settled` what the store has acknowledged."""
    backend = open_backend(url)
    while True:
        leases = await backend.lease(QUEUE, 10, VISIBILITY, 0.2)
        names = [lease.message.body.decode() for lease in leases]
        ledger.write("finished", *names)
        settlements = [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]
        refused = {id(settlement) for settlement in await backend.settle(settlements)}
        ledger.write(
            "settled", *(name for name, each in zip(names, settlements, strict=True) if id(each) not in refused)
        )


async def cancel(url: str, ledger: Ledger) -> None:
    """Cancel every message: two that another instance has leased, a delayed one, and the others."""
    holder, backend = open_backend(url), open_backend(url)
    leases = await holder.lease(QUEUE, 3, VISIBILITY)
    if len(leases) == 3:
        await holder.settle([Settlement(lease=leases.pop(), action=SettleAction.FAIL_TMP, delay=3600.0)])
    for one in (await pending(backend, QUEUE)).values():
        (cancelled,) = await backend.cancel(QUEUE, Selection(ids=[one.message.id]), "program")
        if cancelled.state in {State.READY, State.DELAYED, State.LEASED} or cancelled.already:
            ledger.write("cancelled", one.message.body.decode())
    await backend.aclose()
    await holder.aclose()


async def make_due(url: str, ledger: Ledger) -> None:
    """Publish a delayed message, unless it is stored, and make it due."""
    backend = open_backend(url)
    await backend.publish(QUEUE, [Draft(body=b"late", id="late", delay=3600.0)])
    assert isinstance(backend, OffersDue)
    if await backend.make_due(QUEUE, "late"):
        ledger.write("due", "late")
    await backend.aclose()


async def bulk(url: str, ledger: Ledger, parts: int, rows: int) -> None:
    """One run of the job `bulk`: every partition is staged twice, as by a retry, and one attempt of each counts."""
    backend = open_backend(url)
    writer = qworker.bulk.open(backend, QUEUE, "bulk")
    run, staged = secrets.token_hex(4), list[StagedPartition]()
    if await writer.done(0) is None and await writer.sealed(0) is None:
        for part in range(parts):
            drafts = [Draft(body=f"{part}.{row}".encode()) for row in range(rows)]
            await writer.stage(run, part, "lost", [drafts])
            staged.append(await writer.stage(run, part, "won", [drafts]))
    await writer.commit(0, staged)
    ledger.write("committed", run)
    await backend.aclose()


async def take(url: str, ledger: Ledger) -> None:
    """Lease and ack, a few at a time, until nothing is ready."""
    backend = open_backend(url)
    while (await backend.stats(QUEUE)).ready:
        leases = await backend.lease(QUEUE, 3, VISIBILITY)
        names = [lease.message.body.decode() for lease in leases]
        ledger.write("finished", *names)
        settlements = [Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]
        refused = {id(settlement) for settlement in await backend.settle(settlements)}
        ledger.write(
            "settled", *(name for name, each in zip(names, settlements, strict=True) if id(each) not in refused)
        )
    await backend.aclose()


async def move(url: str, ledger: Ledger) -> None:
    """Do what a reaper does, until the sealed loads of the queue are gone."""
    backend = open_backend(url)
    assert backend.directory is not None
    while list((backend.directory / QUEUE).glob("load-*")):
        await backend.reap(QUEUE)
    ledger.write("moved", 1)
    await backend.aclose()


# The programs that take numbers after the ledger, and those that take nothing else.
WITH_NUMBERS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "publish": publish,
    "hold": hold,
    "cells": cells,
    "bulk": bulk,
    "work": work,
}
PLAIN: dict[str, Callable[[str, Ledger], Coroutine[Any, Any, None]]] = {
    "ack": ack,
    "app_key": app_key,
    "cancel": cancel,
    "contend": contend,
    "make_due": make_due,
    "move": move,
    "replace": replace,
    "take": take,
    "unique": unique,
    "watch": watch,
}


def main(arguments: list[str]) -> None:
    program, url, folder, *rest = arguments
    ledger = Ledger(Path(folder))
    if program in PLAIN:
        asyncio.run(PLAIN[program](url, ledger))
    else:
        asyncio.run(WITH_NUMBERS[program](url, ledger, *map(int, rest)))


if __name__ == "__main__":
    main(sys.argv[1:])
