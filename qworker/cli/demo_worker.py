"""Worker processes of the demos."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

__all__ = ["start_worker"]

# The worker gets `sys.path` from this process. With `-m` it would not find qworker inside a zipapp.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from qworker.cli.main import main; sys.exit(main())"
)


def start_worker(
    arguments: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start `qworker run`.

    Args:
        arguments: The arguments of the command.
        env: Variables of its environment, besides those of this process.
        output: Where its log is written. None: to the terminal.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), "run", *arguments],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
