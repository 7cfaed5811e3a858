"""A process of `qworker ui`, and browsers that look at it."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from harness.bench import Child, child_environment
from harness.running import until
from harness.work import say

__all__ = ["Browser", "Dashboard", "bare_server", "dashboard", "viewers"]


class Browser:
    """One connection that is kept open, of a user who is logged in."""

    def __init__(self, port: int, headers: dict[str, str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = headers

    def get(self, path: str) -> tuple[float, str]:
        """The seconds until a page has arrived, and its text.

        Raises:
            RuntimeError: it has another status than 200.
        """
        began = time.perf_counter()
        try:
            answer = self._ask(path)
        except http.client.RemoteDisconnected:
            # It was idle for too long. A browser connects again.
            answer = self._ask(path)
        body = answer.read()
        taken = time.perf_counter() - began
        if answer.status == 303:
            return taken, answer.headers["location"]
        if answer.status == 503 and b"takes long" in body:
            # The first search in a deep queue. Its user tries again.
            time.sleep(1.0)
            return self.get(path)
        if answer.status != 200:
            raise RuntimeError(f"{path} answers {answer.status}: {body[:500].decode()}")
        return taken, body.decode()

    def _ask(self, path: str) -> http.client.HTTPResponse:
        self._connection.request("GET", path, headers=self._headers)
        return self._connection.getresponse()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Dashboard:
    """What a figure asks it."""

    def __init__(self, pid: int, port: int, headers: dict[str, str]) -> None:
        self.pid = pid
        self.port = port
        self.headers = headers

    def browser(self) -> Browser:
        """Another browser."""
        return Browser(self.port, self.headers)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def counted(self, queue: str) -> None:
        """Wait until the first count of a queue is shown."""
        browser = self.browser()
        until(lambda: "counting" not in browser.get(f"/q/{queue}")[1], "the first count")
        browser.close()


@contextmanager
def dashboard(url: str, folder: Path) -> Generator[Dashboard]:
    """A dashboard that ends with the block.

    Args:
        url: of the store.
        folder: for its log.
    """
    token = secrets.token_urlsafe()
    command = [sys.executable, "-m", "qworker", "ui", url, "--port", "0"]
    log = folder / f"ui-{time.monotonic_ns()}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**child_environment(), "QWORKER_UI_TOKEN": token}
        )
    try:

        def port() -> int:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
            return int(found[1]) if found else 0

        yield Dashboard(process.pid, until(port, "the dashboard"), {"authorization": f"Bearer {token}"})
    finally:
        process.kill()
        process.wait()


@contextmanager
def bare_server() -> Generator[Dashboard]:
    """A server that answers 304 to everything, and does nothing else: what the same requests cost at least."""
    with Child(_serve_bare, {}) as child:
        yield Dashboard(child.pid, child.read(), {})


def _serve_bare(given: dict[str, Any]) -> None:
    del given
    listener = socket.create_server(("127.0.0.1", 0))
    say(listener.getsockname()[1])
    config = uvicorn.Config(_not_modified, log_level="critical", lifespan="off", access_log=False)
    uvicorn.Server(config).run([listener])


async def _not_modified(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive
    await send({"type": "http.response.start", "status": 304, "headers": [(b"etag", b'"1"')]})
    await send({"type": "http.response.body"})


@contextmanager
def viewers(shown: Dashboard, count: int, paths: Sequence[str]) -> Generator[None]:
    """Browsers that fetch what has changed of a page every 2 s, as the script of the pages does, in their own process.

    Args:
        shown: the dashboard.
        count: how many.
        paths: their pages, in turns.
    """
    with Child(_view, {"port": shown.port, "headers": shown.headers, "count": count, "paths": list(paths)}) as child:
        assert child.read() == "all look"
        yield


def _view(given: dict[str, Any]) -> None:
    asyncio.run(_view_all(given))


async def _view_all(given: dict[str, Any]) -> None:
    count, paths = given["count"], given["paths"]
    looked = asyncio.Barrier(count + 1)
    tasks = [
        asyncio.create_task(
            _viewer(given["port"], given["headers"], paths[number % len(paths)], number / count, looked)
        )
        for number in range(count)
    ]
    await looked.wait()
    print('"all look"', flush=True)
    await asyncio.gather(*tasks)


async def _viewer(port: int, headers: dict[str, str], path: str, start: float, looked: asyncio.Barrier) -> None:
    await asyncio.sleep(2 * start)
    lines = [f"GET {path} HTTP/1.1", "host: 127.0.0.1", "x-qworker-fragment: 1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    tag, first = "", True
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                tag = await _fetch(reader, writer, [*lines, *([f"if-none-match: {tag}"] if tag else [])])
                if first:
                    first = False
                    await looked.wait()
                await asyncio.sleep(2.0)
        except (ConnectionError, asyncio.IncompleteReadError):
            # The server closes a connection that is idle for too long. A browser connects again.
            writer.close()


async def _fetch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lines: list[str]) -> str:
    """Fetch what has changed, and return its tag."""
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if not head.startswith(("HTTP/1.1 200", "HTTP/1.1 304")):
        raise RuntimeError(head)
    found = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n"))}
    await reader.readexactly(int(found.get("content-length", 0)))
    return found["etag"]
