"""A Redis server of the bench's own, on loopback, without persistence."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["RedisServer", "redis_server"]


class RedisServer:
    """What a figure asks it."""

    def __init__(self, port: int, folder: Path, options: Sequence[str]) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self._options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._options += ["--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it serves.

        Raises:
            RuntimeError: there is no redis-server, or it does not start.
        """
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("no redis-server: tests/install-tools.sh installs it")
        self._process = subprocess.Popen([program, *self._options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("redis-server does not start")
            time.sleep(0.02)

    def _serves(self) -> bool:
        try:
            return self.ask("PING") == "PONG"
        except (OSError, RuntimeError):
            # Not there yet, or still reading what it has persisted.
            return False

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def ask(self, *words: str) -> str:
        """The reply to one command, as text."""
        with self._connected() as connection:
            connection.sendall(_encoded(words))
            stream = connection.makefile("rb")
            head = stream.readline()
            if head[:1] == b"-":
                raise RuntimeError(head.decode())
            return stream.read(int(head[1:])).decode() if head[:1] == b"$" else head[1:].decode().strip()

    def info(self, section: str) -> dict[str, str]:
        """INFO's lines."""
        return dict(line.split(":", 1) for line in self.ask("INFO", section).splitlines() if ":" in line)

    def cpu(self) -> float:
        """Seconds of CPU that the server has taken."""
        found = self.info("cpu")
        return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])

    @contextmanager
    def monitored(self) -> Iterator[list[int]]:
        """Counts, in the list's only place, the commands that clients send; not those that scripts run."""
        counted = [0]
        with self._connected() as connection:
            connection.sendall(_encoded(["MONITOR"]))
            stream = connection.makefile("rb")
            stream.readline()
            end = b"bench-monitor-end"

            def read() -> None:
                for line in stream:
                    if end in line:
                        return
                    counted[0] += b" lua]" not in line

            reader = threading.Thread(target=read)
            reader.start()
            yield counted
            self.ask("ECHO", end.decode())
            reader.join()

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as connection:
            yield connection


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A server that ends with the block.

    Args:
        folder: where it keeps what it persists: nothing, unless `options` say otherwise.
        options: of its command line.

    Raises:
        RuntimeError: there is no redis-server, or it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RedisServer(port, folder, options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _encoded(words: list[str] | tuple[str, ...]) -> bytes:
    parts = [f"*{len(words)}\r\n".encode()]
    parts += [f"${len(word.encode())}\r\n{word}\r\n".encode() for word in words]
    return b"".join(parts)
