"""Real `qworker` processes for tests: their lines are read as they come, and nothing outlives its test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.waiting import PATIENCE, wait_for

# The Python whose qworker is tried: this one, or that of another installation.
PYTHON = os.environ.get("TEST_PYTHON") or sys.executable
# The states of a thread that does not run: stopped, a zombie, or gone.
_STOPPED = {"T", "Z", ""}


def without_extras() -> bool:
    """Whether it has the package and nothing that is optional."""
    code = "import importlib.util as util, sys; sys.exit(util.find_spec('redis') is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 1


def environment(**more: str) -> dict[str, str]:
    """What a process gets: nothing that a developer has set for qworker, and no buffering."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QWORKER_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | more


class Process:
    """A started `python -m qworker ...`, or another program."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = ("-m", "qworker"),
        executable: str = PYTHON,
    ) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.popen = subprocess.Popen(
            [executable, *program, *arguments],
            cwd=folder,
            env=environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.popen.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.popen.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self._changed.notify_all()

    def line(self, wanted: Callable[[str], bool] | str, count: int = 1) -> str:
        """Wait for the line number `count` that `wanted` accepts, or that holds it."""

        def accepts(line: str) -> bool:
            return wanted in line if isinstance(wanted, str) else wanted(line)

        with self._changed:
            done = self._changed.wait_for(lambda: len(self._matching(accepts)) >= count, PATIENCE)
            assert done, f"no line {count} for {wanted!r}:\n{self.text[-3000:]}"
            return self._matching(accepts)[count - 1]

    def _matching(self, accepts: Callable[[str], bool]) -> list[str]:
        return [line for line in self.lines if accepts(line)]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log events of a name, so far."""
        return [json.loads(line) for line in self._matching(lambda line: f'"event":"{name}"' in line)]

    def event(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait for the log event number `count` of a name."""
        return json.loads(self.line(f'"event":"{name}"', count))

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self) -> int:
        """Wait for its end, and for its last line."""
        status = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def drain(self) -> int:
        self.signal(signal.SIGTERM)
        return self.end()

    def discard(self) -> None:
        """Kill it if it still runs, and leave nothing of it behind."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self._reader.join(PATIENCE)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


@contextmanager
def started(folder: Path, *arguments: str, **options: Any) -> Generator[Process]:
    """A process that is killed at the end, if it still runs then."""
    process = Process(folder, *arguments, **options)
    try:
        yield process
    finally:
        process.discard()


def alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie."""
    return _state(Path(f"/proc/{pid}")) not in {"", "Z"}


def pause(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs: on a busy machine the signal is not handled at once."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(_state(thread) in _STOPPED for thread in Path(f"/proc/{pid}/task").iterdir()), "a stop")


def _state(entry: Path) -> str:
    """The state of a process or thread, by the letters of proc(5), or an empty string if it is gone."""
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
