"""Injecting faults into the programs, and invariant I over the ledger that they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from qworker.message import Lease, Settle, Settlement, State
from qworker.registry import open_backend

PROGRAMS = Path(__file__).with_name("programs.py")
QUEUE = "work"
PATIENCE = 60.0

# What moves a message: the calls at which a process may die or be refused.
MOVES = "rename,renameat,renameat2,link,linkat,unlink,unlinkat,fsync,fdatasync,syncfs,sync_file_range"


def program(*arguments: object, inject: str = "") -> list[str]:
    """The command line of a program, under strace where a fault is to be injected."""
    command = [sys.executable, str(PROGRAMS), *map(str, arguments)]
    if inject:
        calls = inject.partition(":")[0]
        command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", "-e", f"inject={inject}", *command]
    return command


def run(*arguments: object, inject: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever that is."""
    return subprocess.run(
        program(*arguments, inject=inject),
        env={**os.environ, **(env or {})},
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


def start(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program in the background."""
    return subprocess.Popen(program(*arguments), env={**os.environ, **(env or {})}, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a program that was started, with all of its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(PATIENCE)


class Books:
    """What a ledger holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, book: str) -> list[str]:
        path = self._folder / book
        return path.read_text().split() if path.exists() else []

    @property
    def attempted(self) -> set[str]:
        return set(self.read("attempted"))

    @property
    def acked(self) -> set[str]:
        return set(self.read("acked"))

    @property
    def finished(self) -> Counter[str]:
        return Counter(self.read("finished"))

    @property
    def duplicates(self) -> int:
        return sum(self.finished.values()) - len(self.finished)


async def stored(url: str) -> set[str]:
    """The bodies of all messages that wait, run or have failed."""
    backend = open_backend(url)
    await backend.open()
    found: set[str] = set()
    try:
        if QUEUE in await backend.queues():
            for state in (State.READY, State.DELAYED, State.LEASED, State.FAIL):
                found |= {each.message.body.decode() for each in await backend.browse(QUEUE, state, limit=1_000_000)}
    finally:
        await backend.aclose()
    return found


def bodies(url: str) -> set[str]:
    """`stored`, for tests without an event loop."""
    return asyncio.run(stored(url))


def check_invariant(url: str, ledger: Path) -> Books:
    """Invariant I: acknowledged - finished - still stored = nothing, and every finished message was published."""
    books = Books(ledger)
    still = bodies(url)
    finished = set(books.finished)
    lost = books.acked - finished - still
    assert not lost, f"acknowledged, not finished and not stored: {sorted(lost)[:10]} ({len(lost)} in all)"
    phantoms = (finished | still) - books.attempted
    assert not phantoms, f"nobody published {sorted(phantoms)[:10]}"
    return books


def recover(url: str, ledger: Path) -> Books:
    """Let a healthy worker drain the queue; then nothing is stored any more, and invariant I holds."""
    done = run("work", url, ledger)
    assert done.returncode == 0, done.stderr[-2000:]
    books = check_invariant(url, ledger)
    assert not bodies(url), "the healthy worker left messages behind"
    assert books.acked <= set(books.finished)
    return books


def strays(root: Path) -> list[str]:
    """Files of a drained `file:` queue that should not be there."""
    queue = root / QUEUE
    folders = [queue / name for name in ("tmp", "queue", "lease", "delay")]
    return sorted(str(path.relative_to(queue)) for folder in folders if folder.exists() for path in folder.iterdir())


def ack(lease: Lease) -> Settlement:
    """The settlement of a message that is done."""
    return Settlement(lease=lease, how=Settle.ACK)
