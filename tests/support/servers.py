"""Real servers for tests, on their own ports and sockets. They are stopped by pid and never shared."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.clock import SystemClock
from qworker.testing.harness import Harness
from tests.support.certificates import Certificates
from tests.support.processes import pause
from tests.support.waiting import wait_for

__all__ = ["PROGRAMS", "MovedClock", "RedisHarness", "RedisServer", "free_port"]

# The programs that queues are to live in: the system's, and those that tests/install-tools.sh fetches; they are built
# for one processor.
PROGRAMS = ["redis-server", *(["redis-6.2", "valkey-8.1", "valkey-9.1"] if platform.machine() == "x86_64" else [])]
_FETCHED = Path(__file__).parents[2] / ".venv" / ".servers"

_DEADLINE = 60.0
_STOPPING = 10.0


def free_port() -> int:
    """A port that nothing listens on, below the range from which the kernel gives ports to others' connections."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        port = 10_000 + int.from_bytes(os.urandom(2)) % max(low - 10_000 - 10_001, 1000)
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                # A cluster node also listens ten thousand higher.
                bus.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port
    raise AssertionError("no free port")


class MovedClock(SystemClock):
    """The machine's clocks, and what `advance` has added: for backends on a server whose clock is moved along."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class RedisHarness(Harness):
    """The contract suite's view of a server whose clock it moves.

    Args:
        server: the server.
        url: of what is tested there; None: the native queues.
        moved: the clock of all harnesses of that server, for a protocol whose clients tell what time it is.
    """

    def __init__(self, server: RedisServer, *, url: str | None = None, moved: MovedClock | None = None) -> None:
        super().__init__(url or server.url, clock=None, tick=60.0)
        self._server = server
        self._moved = moved or MovedClock()

    def make(self, *, remote_leases: bool = False, **options: str) -> Backend:
        backend = open_backend(self.with_options(options), clock=self._moved, remote_leases=remote_leases)
        self._opened.append(backend)
        return backend

    async def advance(self, seconds: float) -> None:
        self._moved.ahead += seconds
        self._server.advance(seconds)


class RedisServer:
    """A redis-server of a test's own: on a socket in a new directory, and on a port where it is asked for.

    Args:
        options: of redis.conf, by name.
        port: listen there too, on 127.0.0.1; 0: on the socket only.
        tls: the port speaks TLS only, with these certificates, and so do its connections to other servers.
        moved_clock: the server's clock can be moved with `advance`.
        stopped_clock: and moves by nothing else.
        sentinel: run it as a sentinel, with these lines of configuration.
        program: one of `PROGRAMS`.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tls: Certificates | None = None,
        moved_clock: bool = False,
        stopped_clock: bool = False,
        sentinel: str | None = None,
        program: str = "redis-server",
        start: bool = True,
        **options: str,
    ) -> None:
        binary = shutil.which(program) if program == "redis-server" else shutil.which(_FETCHED / program)
        assert binary is not None, f"the tests need {program}: run tests/install-tools.sh"
        self._binary = binary
        # Short: the path of a socket has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="qw-redis-"))
        self.socket = self.directory / "s"
        self.port = port
        self._tls = tls
        self.options = {"save": '""', "appendonly": "no"} | {n.replace("_", "-"): v for n, v in options.items()}
        self._sentinel = sentinel
        self._clock = self.directory / "clock" if moved_clock or stopped_clock else None
        self._stopped = stopped_clock
        self._clock_us = time.time_ns() // 1000 if stopped_clock else 0
        self._process: subprocess.Popen[bytes] | None = None
        if start:
            try:
                self.start()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """For a backend: by the socket."""
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        """For a backend: by the port."""
        assert self.port
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> Redis:
        """A plain client of the server."""
        return Redis(
            unix_socket_path=str(self.socket), password=self.options.get("requirepass"), retry=Retry(NoBackoff(), 0)
        )

    def start(self) -> None:
        """Start it, and wait until it serves."""
        lines = [
            f"unixsocket {self.socket}",
            *([f"port {self.port}"] if self._tls is None else self._tls.server_lines(self.port)),
            "bind 127.0.0.1",
            f"dir {self.directory}",
            "daemonize no",
            f"logfile {self.directory}/log",
            *[f"{name} {value}" for name, value in self.options.items() if self._sentinel is None],
            self._sentinel or "",
        ]
        config = self.directory / "redis.conf"
        # A sentinel keeps what it has learnt in its configuration.
        if self._sentinel is None or not config.exists():
            config.write_text("\n".join(lines) + "\n")
        command = [self._binary, str(config), *(["--sentinel"] if self._sentinel is not None else [])]
        self._process = subprocess.Popen(
            command, env=self._environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_until_it_serves()

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._clock is not None:
            self._clock.write_bytes(self._clock_reading())
            environment |= {"LD_PRELOAD": str(self._built_clock()), "QWORKER_TEST_CLOCK": str(self._clock)}
        return environment

    def _built_clock(self) -> Path:
        library = self.directory / "clock.so"
        if not library.exists():
            source = Path(__file__).with_name("moved_clock.c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        return library

    def _wait_until_it_serves(self) -> None:
        wait_for(self._serves, "redis-server serves", self._log, timeout=_DEADLINE)

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"redis-server ended: {self._log()}"
        try:
            with self.client() as client:
                client.ping()
        except RedisError:
            return False
        return True

    def _log(self) -> str:
        log = self.directory / "log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else "no log"

    def advance(self, seconds: float) -> None:
        """Move the server's clock."""
        assert self._clock is not None, "start the server with moved_clock=True"
        with self.client() as client:
            began, before = time.monotonic(), _seconds(client)
            self._clock_us += round(seconds * 1e6)
            with self._clock.open("r+b", buffering=0) as file:
                file.write(self._clock_reading())
            # Valkey 9 looks at the clock once in a millisecond.
            while abs(_seconds(client) - before - seconds) > (passed := time.monotonic() - began) + 0.005:
                assert passed < _DEADLINE, "the server does not see its clock move"

    def _clock_reading(self) -> bytes:
        return struct.pack("=qq", self._clock_us, self._stopped)

    def pause(self) -> None:
        """Stop it where it is: connections stay, and nothing answers."""
        pause(self.pid)

    def go_on(self) -> None:
        """Undo `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End the server; `start` brings it back with what it had persisted."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self.go_on()
            self._process.send_signal(how)
            try:
                self._process.wait(_STOPPING)
            except subprocess.TimeoutExpired:
                # It refuses while it writes its first append-only file, for one.
                self._process.kill()
                self._process.wait(_DEADLINE)
        self._process = None

    def close(self) -> None:
        """End the server and remove its files."""
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)


def _seconds(client: Redis) -> float:
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)
