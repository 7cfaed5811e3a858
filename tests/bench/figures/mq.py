"""The mq endpoints over `mq:` with durable accept, for 64 connections from clients on the same machine."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from harness import Bench, Figure
from harness.bench import child_environment
from harness.report import median
from harness.stopwatch import Stopwatch

_CONNECTIONS = 64
_ASKED = {"POST": 1_500, "GET + DELETE": 2_500}


def measure(bench: Bench) -> list[Figure]:
    """Requests a second of each kind, and the answers that were not what they must be."""
    rates: dict[str, list[float]] = {name: [] for name in _ASKED}
    errors = 0
    for _ in range(bench.few):
        folder = bench.fresh()
        with _served(folder) as port:
            result = bench.call(load, port=port, count=bench.size(12_000, 640))
        bench.discard(folder)
        errors += result["errors"]
        for name in _ASKED:
            rates[name].append(result[name])
    found = [
        Figure(
            figure="mq",
            what=f"{name}, {_CONNECTIONS} connections",
            asked=asked,
            at_most=False,
            measured=median(rates[name]),
            unit="/s",
            rounds=rates[name],
        )
        for name, asked in _ASKED.items()
    ]
    return [*found, Figure(figure="mq", what="errors", asked=0, measured=float(errors), unit="")]


@contextmanager
def _served(folder: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "qworker", "serve", f"mq://{folder}", "--port", str(port)]
    process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("qworker serve does not start")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def load(given: dict[str, Any]) -> dict[str, float]:
    """Post `count` messages and take them all again, over connections that stay open."""
    from harness.work import run_loop

    count, port = given["count"] // _CONNECTIONS, given["port"]
    errors = 0
    head = b"Host: 127.0.0.1\r\n"
    post = b"POST /bench/messages HTTP/1.1\r\n" + head + b"Content-Length: 100\r\n\r\n" + b"x" * 100
    get = b"GET /bench/messages HTTP/1.1\r\n" + head + b"\r\n"

    async def ask(connection: _Connection, request: bytes, wanted: int) -> bytes:
        nonlocal errors
        status, headers = await connection.ask(request)
        errors += status != wanted
        return headers

    async def posts(connection: _Connection) -> None:
        for _ in range(count):
            await ask(connection, post, 201)

    async def pairs(connection: _Connection) -> None:
        nonlocal errors
        for _ in range(count):
            found = re.search(rb"x-message-id: *(\S+)", await ask(connection, get, 200), re.IGNORECASE)
            if found is None:
                errors += 1
            else:
                await ask(connection, b"DELETE /bench/messages/" + found[1] + b" HTTP/1.1\r\n" + head + b"\r\n", 202)

    async def run() -> dict[str, float]:
        connections = [await _Connection.open(port) for _ in range(_CONNECTIONS)]
        await ask(connections[0], b"PUT /bench HTTP/1.1\r\n" + head + b"Content-Length: 0\r\n\r\n", 201)
        rates: dict[str, float] = {}
        for name, work in (("POST", posts), ("GET + DELETE", pairs)):
            timer = Stopwatch()
            await asyncio.gather(*[work(connection) for connection in connections])
            rates[name] = count * _CONNECTIONS / timer.seconds
        for connection in connections:
            connection.close()
        return {**rates, "errors": errors}

    return run_loop(run())


class _Connection(asyncio.Protocol):
    """A client that costs next to nothing beside the server: one answer at a time, with a Content-Length or none."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, port: int) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((0, b""))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """The status and the headers of the answer; 0 when the connection was lost."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        headers = self._data[:end]
        length = re.search(rb"content-length: *(\d+)", headers, re.IGNORECASE)
        whole = end + 4 + (0 if length is None else int(length[1]))
        if len(self._data) >= whole:
            self._data = self._data[whole:]
            assert self._answer is not None
            self._answer.set_result((int(headers[9:12]), headers))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()
