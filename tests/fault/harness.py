"""Injecting faults into the programs, and invariant I over the ledger that they leave."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Lease, Query, SettleAction, Settlement, State
from tests.support.pending import pending

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs.py"
QUEUE = "work"
# Seconds that anything here may take on a busy machine.
PATIENCE = 60.0

KILL, FAIL, LOSE = 1, 2, 3
MOVES, SYNCS, COMMANDS, MARKS = 1, 2, 4, 8
ANY_CALL = MOVES | SYNCS


def fault(mode: int, when: int, *, number: int = 0, every: int = 0, kinds: int = ANY_CALL) -> list[int]:
    """A fault as the shim takes it: see shim.c."""
    return [mode, number, when, every, kinds]


def build_shim(folder: Path) -> Path:
    """Compile the shim."""
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "shim.c", "-ldl"], check=True)
    return library


class Launcher:
    """Runs programs under a fault, one after another; see launcher.py."""

    def __init__(self, shim: Path, errors: Path) -> None:
        self._errors = errors
        with open(errors, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.launcher"],
                cwd=HERE.parent.parent,
                env={**os.environ, "LD_PRELOAD": str(shim)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )

    def run(self, *arguments: object, fault: list[int] | None = None) -> int:
        """Run a program to its end; its exit status, negative for a signal."""
        return self._ask(do="run", arguments=[str(argument) for argument in arguments], fault=fault)

    def start(self, *arguments: object) -> int:
        """Start a program; its process id."""
        return self._ask(do="start", arguments=[str(argument) for argument in arguments], fault=None)

    def kill(self, child: int) -> int:
        """Kill a program that was started; its exit status, negative if it was not over already."""
        return self._ask(do="kill", child=child)

    def load(self, module: str) -> None:
        """Import a module once for all programs that are started later."""
        self._ask(do="load", module=module)

    def _ask(self, **request: object) -> int:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], PATIENCE)
        assert ready, f"{request} does not end: {self.errors()}"
        return int(stdout.readline())

    def errors(self) -> str:
        """The end of what the programs wrote to stderr."""
        return self._errors.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        kill(self._process)


def start(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program in the background."""
    command = [sys.executable, str(PROGRAMS), *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **(env or {})}, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a program that was started, with all of its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(PATIENCE)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


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


async def _stored(url: str) -> set[str]:
    backend = open_backend(url)
    await backend.open()
    found: set[str] = set()
    try:
        if QUEUE in await backend.queues():
            still = [*(await pending(backend, QUEUE)).values()]
            still += await list_messages(backend, QUEUE, Query(State.FAILED))
            found |= {stored.message.body.decode() for stored in still}
    finally:
        await backend.aclose()
    return found


def stored(url: str) -> set[str]:
    """The bodies of all messages that wait, run or have failed."""
    return asyncio.run(_stored(url))


def check_invariant(url: str, ledger: Path) -> Books:
    """Invariant I: acknowledged - finished - still stored = nothing, and every finished message was published."""
    books = Books(ledger)
    still = stored(url)
    finished = set(books.finished)
    lost = books.acked - finished - still
    assert not lost, f"acknowledged, not finished and not stored: {sorted(lost)[:10]} ({len(lost)} in all)"
    phantoms = (finished | still) - books.attempted
    assert not phantoms, f"nobody published {sorted(phantoms)[:10]}"
    return books


def drain(url: str, ledger: Path) -> Books:
    """Let a healthy consumer take everything; then nothing is stored any more, and invariant I holds."""
    asyncio.run(_drain(url, ledger))
    books = check_invariant(url, ledger)
    assert not stored(url), "the healthy consumer left messages behind"
    assert books.acked <= set(books.finished)
    return books


async def _drain(url: str, ledger: Path) -> None:
    backend = open_backend(url)
    deadline = time.monotonic() + PATIENCE
    try:
        while QUEUE in await backend.queues():
            await backend.reap(QUEUE)
            leases = await backend.lease(QUEUE, 1000, 600.0)
            with open(ledger / "finished", "a") as book:
                book.writelines(f"{lease.message.body.decode()}\n" for lease in leases)
            assert await backend.settle([ack(lease) for lease in leases]) == []
            stats = await backend.stats(QUEUE)
            if not (stats.ready or stats.leased or stats.delayed):
                return
            assert time.monotonic() < deadline, f"the queue is not drained: {stats}"
            if not leases:
                await backend.wait([QUEUE], 0.2)
    finally:
        await backend.aclose()


def strays(root: Path) -> list[str]:
    """Files of a drained `file:` queue that should not be there, once unfinished ones have grown old."""
    queue = root / QUEUE
    if not queue.exists():
        return []
    long_ago = time.time() - 40 * 3600
    for unfinished in (queue / "tmp").iterdir():
        # A link, too: its target is no file.
        os.utime(unfinished, (long_ago, long_ago), follow_symlinks=False)
    asyncio.run(_reap(f"file://{root}"))
    folders = [queue / name for name in ("tmp", "queue", "lease", "delay", "names", "workers")]
    return sorted(str(path.relative_to(queue)) for folder in folders for path in folder.iterdir())


async def _reap(url: str) -> None:
    backend = open_backend(url)
    await backend.reap(QUEUE)
    await backend.aclose()


def ack(lease: Lease) -> Settlement:
    """The settlement of a message that is done."""
    return Settlement(lease=lease, action=SettleAction.ACK)
