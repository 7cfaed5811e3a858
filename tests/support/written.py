"""The files that commit 31528ec wrote. tests/fixtures/written-by-31528ec has them, and the program that wrote them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.message import State, StoredMessage
from tests.support.servers import MovedClock, RedisServer, free_port

__all__ = [
    "DIRECTORIES",
    "FOLDER",
    "KINDS",
    "STATES",
    "Written",
    "body_of",
    "described",
    "manifest",
    "open_written",
    "restore_keys",
    "unpack_all",
]

FOLDER = Path(__file__).parents[1] / "fixtures" / "written-by-31528ec"
DIRECTORIES = ("file", "fsq", "mq", "sq", "vsqs")
KINDS = (*DIRECTORIES, "redis", "rfq")
# Of URLs, in the words of today: what is done is kept where that can be, and so is the history.
OPTIONS = {
    **dict.fromkeys(KINDS, "?history=1"),
    "file": "?keep_done=all",
    "fsq": "?keep_done=all&history=1",
    "sq": "?history=1&segment_size=65536",
    "redis": "?keep_done=all",
}
KEEPS_DONE = ("file", "fsq", "redis")
# The words of the manifest.
STATES = {
    "ready": State.READY,
    "leased": State.LEASED,
    "delayed": State.DELAYED,
    "done": State.DONE,
    "fail": State.FAILED,
}


class Written:
    """A store as it was written, on the clock of that moment."""

    def __init__(self, kind: str, url: str, spool: Path, clock: MovedClock, server: RedisServer | None) -> None:
        self.kind = kind
        self.url = url
        # Where bulk loads are spooled.
        self.spool = spool
        self.clock = clock
        self.server = server
        self.facts: dict[str, Any] = manifest()[kind]
        self._opened: list[Backend] = []

    @property
    def queues(self) -> dict[str, Any]:
        return self.facts["queues"]

    def messages(self, queue: str, *states: str) -> list[dict[str, Any]]:
        """What a queue had, in some states or in any."""
        return [one for one in self.queues[queue]["messages"] if not states or one["state"] in states]

    def advance(self, seconds: float) -> None:
        self.clock.ahead += seconds
        if self.server is not None:
            self.server.advance(seconds)

    async def open(self, *, remote_leases: bool = False) -> Backend:
        backend = open_backend(self.url, clock=self.clock, remote_leases=remote_leases)
        self._opened.append(backend)
        await backend.open()
        return backend

    async def aclose(self) -> None:
        while self._opened:
            await self._opened.pop().aclose()


def manifest() -> dict[str, Any]:
    """What the fixtures hold, as their writer saw it."""
    return json.loads((FOLDER / "manifest.json").read_text())


def body_of(described: dict[str, Any]) -> bytes:
    return base64.b64decode(described["body"])


@asynccontextmanager
async def open_written(kind: str, folder: Path, program: str = "redis-server") -> AsyncIterator[Written]:
    """`restored`, and what a test has opened there is closed."""
    with restored(kind, folder, program) as written:
        try:
            yield written
        finally:
            await written.aclose()


@contextmanager
def restored(kind: str, folder: Path, program: str = "redis-server") -> Iterator[Written]:
    """A copy of a store, a second after it was written."""
    clock = MovedClock()
    unpack_all(kind, folder)
    server = None
    if kind in DIRECTORIES:
        url = f"{kind}://{folder / kind}"
    else:
        server = RedisServer(port=free_port(), program=program, moved_clock=True)
        url = server.url if kind == "redis" else f"rfq://127.0.0.1:{server.port}/0"
    written = Written(kind, url + OPTIONS[kind], folder / f"{kind}.staged", clock, server)
    try:
        # First: from then on what is to be forgotten some day is on its way there.
        written.advance(written.facts["written_at"] + 1.0 - clock.time())
        if server is not None:
            restore_keys(kind, server)
        yield written
    finally:
        if server is not None:
            server.close()


def unpack_all(kind: str, folder: Path) -> None:
    """Unpack a store's directories, if it has any."""
    archive = FOLDER / f"{kind}.tar.gz"
    if not archive.exists():
        return
    command = ["tar", "--xattrs", "--warning=no-timestamp", "-xpzf", str(archive), "-C", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    # What is staged and not sealed is kept for 36 hours.
    for pattern in (f"{kind}.staged/**/*", f"{kind}/*/tmp/staged/**/*"):
        for path in folder.glob(pattern):
            os.utime(path, (time.time(), time.time()))
    if kind == "mq":
        _move_nothing(folder / "mq")


def _move_nothing(root: Path) -> None:
    """A lease of mq. It has the change time of its file, which a copy of the file cannot have."""
    for path in (root / ".qworker" / "lease").iterdir():
        record = json.loads(path.read_bytes())
        if record.get("moved"):
            record["moved"] = (root / "delay" / path.name).stat().st_ctime_ns
            path.write_bytes(msgspec.json.encode(record).ljust(2048))


def restore_keys(kind: str, server: RedisServer) -> None:
    """Give a server the keys of a store."""
    with server.client() as client:
        for row in json.loads((FOLDER / f"{kind}.keys.json").read_text()):
            client.restore(row["key"], row["ttl"], base64.b64decode(row["dump"]))
            assert client.type(row["key"]).decode() == row["type"]


def described(stored: StoredMessage) -> dict[str, Any]:
    """A message in the words of the manifest."""
    message = stored.message
    words = {state: word for word, state in STATES.items()}
    found = {
        "id": message.id,
        "state": words[stored.state],
        "body": base64.b64encode(message.body).decode(),
        "tries": message.tries,
        "enqueued_at": message.enqueued_at,
        "priority": message.priority,
        "key": message.unique_key,
        "arguments": list(message.argv),
        "fields": None if message.fields is None else dict(message.fields),
        "origin": message.original_id,
        "due_at": stored.due_at,
        "expires_at": stored.expires_at,
        "finished_at": stored.finished_at,
        "holder": stored.holder,
        "error": stored.error,
    }
    return {name: value for name, value in found.items() if value not in (None, [])}
