"""Starts the programs by fork, from a process that has imported everything: a hundred deaths cost seconds, not minutes.

Runs with the shim preloaded. Reads one JSON request a line and answers each with a line:

    {"do": "run", "arguments": [...], "fault": [mode, errno, when, every, kinds] | null}    the exit status
    {"do": "start", "arguments": [...], "fault": ...}                                       the child's process id
    {"do": "kill", "child": process id}                                                     the exit status
    {"do": "load", "module": name}                       0, after the import, which no program has to repeat then

An exit status is negative for a signal.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from tests.fault import programs


def _start(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if request["fault"] is not None:
            ctypes.CDLL(None).arm(*request["fault"])
        programs.main(request["arguments"])
        status = 0
    except SystemExit as end:
        print(end.code, file=sys.stderr, flush=True)
    except BaseException:  # noqa: BLE001 - a forked child ends here, and nowhere else
        traceback.print_exc()
    finally:
        os._exit(status)


def _end(child: int) -> int:
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _kill(child: int) -> int:
    # Not waited for yet, so the number is still its own.
    os.kill(child, signal.SIGKILL)
    return _end(child)


def main() -> None:
    # Programs log to stdout; the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        match request["do"]:
            case "run":
                answer = _end(_start(request))
            case "start":
                answer = _start(request)
            case "kill":
                answer = _kill(request["child"])
            case "load":
                importlib.import_module(request["module"])
                answer = 0
            case unknown:
                raise SystemExit(f"unknown request {unknown}")
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
