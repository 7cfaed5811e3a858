"""The texts that programs read from qworker, in `tests/golden`. A change of one changes the file in its commit.

`QWORKER_TEST_GOLDEN=write make test ARGS="-k golden"` writes them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qworker.cli.main import main

__all__ = ["Normal", "check", "json_of_command"]

FOLDER = Path(__file__).parents[1] / "golden"
# What differs from run to run inside texts.
_VARYING = (
    (re.compile(r"\b\d{14}_\d+_\d+_[\w.-]+-[0-9a-f]{6,}\b"), "<id>"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"), "<moment>"),
    (re.compile(r"\b\d+(\.\d+)? s\b"), "<number> s"),
)


class Normal:
    """Makes the same text of the same behaviour: moments, durations and what differs between machines become words.

    Args:
        words: texts of this run, and what to write instead.
        varies: whether the value of a field differs from run to run.
    """

    def __init__(self, words: dict[str, str], varies: Callable[[str], bool]) -> None:
        self._words = sorted(words.items(), key=lambda pair: -len(pair[0]))
        self._varies = varies

    def value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {self.text(name): self.value(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, key) for one in value]
        if isinstance(value, str):
            return "<text>" if self._varies(key) else self.text(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and self._varies(key):
            return f"<{type(value).__name__}>"
        return value

    def text(self, text: str) -> str:
        for given, word in self._words:
            text = text.replace(given, word)
        for pattern, word in _VARYING:
            text = pattern.sub(word, text)
        return text


def json_of_command(
    arguments: list[str],
    normal: Normal,
    capsys: pytest.CaptureFixture[str],
    prepare: Callable[[Any], Any] = lambda printed: printed,
) -> dict[str, Any]:
    """Run a command of `qworker` with `--json`: what it was, its exit status, its document, and what it says beside it.

    Args:
        arguments: the command.
        normal: makes it the same in each run.
        capsys: has what is printed.
        prepare: changes the document first.
    """
    capsys.readouterr()
    status = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    return {
        "command": normal.text(" ".join([*arguments, "--json"])),
        "status": status,
        "json": normal.value(prepare(json.loads(out) if out else None)),
        "stderr": normal.text(err).splitlines(),
    }


def check(name: str, found: Any) -> None:
    """Compare what was found with `tests/golden/NAME.json`, or write it there when that was asked for."""
    path = FOLDER / f"{name}.json"
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    if os.environ.get("QWORKER_TEST_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs: if that is meant, write it with QWORKER_TEST_GOLDEN=write"
