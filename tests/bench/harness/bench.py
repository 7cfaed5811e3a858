"""What a figure is given: where to measure, how much, and a way to run its parts in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["Bench", "Child", "child_environment"]

_CHILD = Path(__file__).parents[1] / "child.py"
# What is counted in millions takes minutes: too long where it is repeated for two codes.
_OWN_MOST = 100_000


class Bench:
    """One run of the bench.

    Args:
        folder: an empty folder on the disk that is measured.
        quick: small numbers, to see that everything runs; the figures mean nothing.
        own: one round of qworker's own side, without its peers: the rounds are those of `--against`.
    """

    def __init__(self, folder: Path, *, quick: bool, own: bool = False) -> None:
        self.folder = folder
        self.quick = quick
        self.own = own
        self._used = 0

    def size(self, full: int, quick: int) -> int:
        """How many: `full`, or `quick` under `--quick`."""
        if self.quick:
            return quick
        return min(full, _OWN_MOST) if self.own else full

    @property
    def rounds(self) -> int:
        """How often what is compared is repeated, in turns."""
        return 5 if self.warms_up else 1

    @property
    def few(self) -> int:
        """The same for what takes long."""
        return 3 if self.warms_up else 1

    @property
    def warms_up(self) -> bool:
        """Whether a pass that does not count comes first."""
        return not (self.quick or self.own)

    def fresh(self) -> Path:
        """A new empty folder."""
        self._used += 1
        path = self.folder / str(self._used)
        path.mkdir()
        return path

    def url(self, folder: Path, sync: str = "off") -> str:
        """The URL of a directory queue in a folder."""
        return f"file://{folder}/spool?sync={sync}"

    def call(self, function: Callable[[dict[str, Any]], Any], **parameters: Any) -> Any:
        """The result of a figure's function, called in a fresh process."""
        with Child(function, parameters) as child:
            return child.result()

    def turns(
        self, sides: Sequence[tuple[str, Callable[[], float]]], *, rounds: int | None = None
    ) -> dict[str, list[float]]:
        """Measure every side in turns, after a pass of all of them that does not count."""
        found: dict[str, list[float]] = {name: [] for name, _ in sides}
        rounds = rounds if rounds is not None and self.warms_up else self.rounds
        for turn in range(rounds + self.warms_up):
            # The other way round in every second turn, so that neither side always follows the other.
            for name, measure in sides if turn % 2 == 0 else reversed(sides):
                value = measure()
                if turn > 0 or not self.warms_up:
                    found[name].append(value)
        return found

    def discard(self, folder: Path) -> None:
        """Remove what a measurement left."""
        shutil.rmtree(folder)


class Child:
    """A figure's function in its own process: `child.py MODULE FUNCTION`. It reads its parameters from standard input.

    Each line that it prints with `say` can be read with `read`; what it returns comes last.
    """

    def __init__(self, function: Callable[[dict[str, Any]], Any], parameters: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_CHILD), function.__module__, function.__name__, json.dumps(parameters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, line: str = "") -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """The next thing that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measured process ended with {self._process.wait()}; its errors stand above")
        return json.loads(line)

    def result(self) -> Any:
        """What the function returned."""
        value = self.read()
        if self._process.wait() != 0:
            raise RuntimeError(f"a measured process ended with {self._process.returncode}")
        return value


def child_environment() -> dict[str, str]:
    """The environment of measured processes: nothing of the user's settings for qworker or Python."""
    dropped = ("QWORKER_", "PYTHON")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
