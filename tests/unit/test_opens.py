"""Every file and directory of a store is opened in one module, where no link is followed and no pipe blocks."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENING = "qworker/kit/opening.py"
# Places that open no name of a store, with the reason. A name of a function, or all of a module.
ELSEWHERE = {
    "qworker/streams.py": "/dev/null",
    "qworker/kit/linux.py": "/proc, and a directory to ask for its file system (O_PATH opens nothing)",
    "qworker/pipeline/spark/storage.py": "the lake of the user, a directory that only the user's jobs write to",
    "qworker/pipeline/report/html.py": "a file of the package",
    "qworker/charts.py": "a file of the package",
    "qworker/ui/assets.py": "a file of the package",
    "qworker/settings.py": "the user's settings",
    "qworker/cli/pipeline/report.py": "the report that the user asked for, where the user wants it",
    "qworker/cli/demo.py": "a new directory of the demo",
    "qworker/cli/demo_app.py": "a new directory of the demo",
    "qworker/cli/demo_ui.py": "a new directory of the demo",
    "backends/qworker_redis/scripts.py": "files of the package",
}
PATH_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "touch"}


def opens(call: ast.Call) -> bool:
    """Whether a call opens a file: `os.open`, the builtin `open`, or one of a path's methods."""
    called = call.func
    if isinstance(called, ast.Name):
        return called.id == "open"
    if not isinstance(called, ast.Attribute):
        return False
    if called.attr == "open":
        # The other methods of this name, of backends and stores, take no path and no mode.
        first = call.args[0] if call.args else None
        of_path = (
            isinstance(first, ast.Constant) and isinstance(first.value, str) and set(first.value) <= set("rwaxbt+")
        )
        return of_path or (isinstance(called.value, ast.Name) and called.value.id in {"os", "io"})
    return called.attr in PATH_METHODS


def found_opens() -> dict[str, list[int]]:
    """The lines that open files, by module."""
    found: dict[str, list[int]] = {}
    for path in sorted([*(ROOT / "qworker").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]):
        lines = [
            node.lineno for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Call) and opens(node)
        ]
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    return found


def test_every_name_of_a_store_is_opened_by_the_one_module_that_follows_no_link() -> None:
    found = found_opens()
    others = {name: lines for name, lines in found.items() if name != OPENING and name not in ELSEWHERE}
    assert OPENING in found
    assert others == {}, "open it with qworker.kit.opening, or name the module here with the reason"


def test_each_module_that_opens_other_files_still_does() -> None:
    assert ELSEWHERE.keys() <= found_opens().keys()
