"""A kubelet for tests: it starts a container's command, probes it, and stops it, by the fields of a real manifest.

As root each pod gets a network namespace of its own, where all of them listen on the same port; otherwise each gets a
free port.
"""

from __future__ import annotations

import ctypes
import functools
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.processes import Process
from tests.support.waiting import PATIENCE, block_for

_CLONE_NEWNET = 0x40000000

# Becomes the pod's process, in a namespace of its own whose loopback is up.
_SANDBOX = """
import ctypes, fcntl, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000):
    sys.exit(77)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
if len(sys.argv) > 1:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@functools.cache
def has_namespaces() -> bool:
    """Whether this user may make network namespaces."""
    return subprocess.run([sys.executable, "-c", _SANDBOX], check=False, timeout=PATIENCE).returncode == 0


class Pod:
    """One container of a pod, from its start to its end.

    Args:
        folder: where it runs.
        container: of the manifest.
        grace: `terminationGracePeriodSeconds`.
        pace: what the manifest's seconds are multiplied with.
    """

    def __init__(
        self, folder: Path, container: dict[str, Any], *, grace: float, pace: float, env: dict[str, str], quiet: float
    ) -> None:
        self.killed = False
        self._container = container
        self._grace = grace * pace
        self._pace = pace
        self._quiet = quiet
        self._own_network = has_namespaces()
        arguments = list(container["args"])
        if not self._own_network:
            arguments[arguments.index("--health") + 1] = "127.0.0.1:0"
        program = ("-c", _SANDBOX, "-m", "qworker") if self._own_network else ("-m", "qworker")
        self.process = Process(folder, *arguments, "--log-format", "json", program=program, env=env)
        self._stopped = threading.Event()
        self.ready = threading.Event()
        # The liveness probe has failed as often as the manifest allows.
        self.unhealthy = threading.Event()
        self._failure: BaseException | None = None
        self._prober = threading.Thread(target=self._guarded, daemon=True)
        self._prober.start()

    # -- probes --------------------------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._probe()
        except BaseException as error:  # noqa: BLE001 - raised again where the test waits
            self._failure = error

    def _probe(self) -> None:
        # The address is known when the port is: as a kubelet's first probes, those before would be refused.
        while not self.process.events("health_server_started"):
            if self._stopped.wait(0.02) or self.process.popen.poll() is not None:
                return
        port = int(self.process.events("health_server_started")[0]["port"])
        if self._own_network:
            self._enter_network()
        probes = self._container
        started, failures = False, 0
        while not self._stopped.is_set() and self.process.popen.poll() is None:
            if not started:
                started = self._ask(port, probes["startupProbe"])
            else:
                if not self.ready.is_set() and self._ask(port, probes["readinessProbe"]):
                    self.ready.set()
                failures = 0 if self._ask(port, probes["livenessProbe"]) else failures + 1
                if failures >= probes["livenessProbe"]["failureThreshold"]:
                    self.unhealthy.set()
            self._stopped.wait(0.1)

    def _enter_network(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self.process.pid}/ns/net", "rb") as namespace:
            # This thread only.
            assert libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    def _ask(self, port: int, probe: dict[str, Any]) -> bool:
        # Not the manifest's second or two: the machine that runs the tests is busier than a node should be.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        try:
            connection.request("GET", probe["httpGet"]["path"])
            return 200 <= connection.getresponse().status < 400
        except OSError:
            return False
        finally:
            connection.close()

    # -- its end -------------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        self._wait(self.ready, "ready")

    def wait_unhealthy(self) -> None:
        self._wait(self.unhealthy, "unhealthy")

    def _wait(self, event: threading.Event, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not event.wait(0.05):
            if self._failure is not None:
                raise self._failure
            assert self.process.popen.poll() is None, self.process.text[-3000:]
            assert time.monotonic() < deadline, f"not {what} within {PATIENCE} s\n{self.process.text[-3000:]}"

    def stop(self) -> int:
        """As a kubelet does: preStop, SIGTERM, the rest of the grace period, SIGKILL."""
        deadline = time.monotonic() + self._grace
        if self._quiet:
            self.process.signal(signal.SIGTSTP)
            block_for(self._quiet * self._pace)
        self.process.signal(signal.SIGTERM)
        try:
            self.process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        return self.finish()

    def kill(self) -> None:
        """SIGKILL for all of its processes, as the end of its process namespace is."""
        self.killed = True
        pids = [self.process.pid, *_descendants(self.process.pid)]
        # The supervisor first, so that it replaces nobody.
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                # Ended meanwhile, and reaped by its parent.
                pass

    def finish(self) -> int:
        """Wait for its end."""
        self._stopped.set()
        status = self.process.end()
        self._prober.join(PATIENCE)
        if self._failure is not None:
            raise self._failure
        return status

    def discard(self) -> None:
        """Whatever has happened: leave nothing behind."""
        self._stopped.set()
        if self.process.popen.poll() is None:
            self.kill()
        self.process.discard()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return found
    for child in map(int, children):
        found += [child, *_descendants(child)]
    return found
