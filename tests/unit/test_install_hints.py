"""Nothing in the tree installs the project `qworker` of the package index, which is another one."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A requirement of the foreign project; `qworker-tasks`, a path and a wheel file are none.
FOREIGN = re.compile(r"qworker(\[[^\]]*\])?(\s*([=<>!~]=|[<>@]).*)?", re.IGNORECASE)
INSTALLER = re.compile(
    r"\b(?:pip3?|pipx|uv|uvx|poetry|conda|mamba)\b[^\n|;&]*?\b(?:install|add|download|wheel)\b([^\n`|;&]*)"
)
REQUIREMENT_LINES = re.compile(r"(^|/)(requirements|constraints)[^/]*\.(txt|in)$")


def foreign_requirements(name: str, text: str) -> Iterator[str]:
    """What in a file would fetch the foreign project."""
    joined = text.replace("\\\n", " ")
    # An extra of it is a requirement wherever it stands.
    yield from (found.group() for found in re.finditer(r"(?<![\w./-])qworker\[\w[\w,{}-]*\]", joined))
    for command in INSTALLER.finditer(joined):
        words = (word.strip("'\"") for word in command.group(1).split())
        yield from (word for word in words if FOREIGN.fullmatch(word))
    if REQUIREMENT_LINES.search(name):
        yield from (line for line in joined.splitlines() if FOREIGN.fullmatch(line.partition("#")[0].strip()))
    if name.endswith("pyproject.toml"):
        yield from (text for text in _texts(tomllib.loads(text)) if re.match(r"qworker\s*[\[=<>!~@]", text))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "run `pip install qworker`"),
        ("README.md", "`pip install -U 'qworker>=2'` is new"),
        ("errors.py", "needs it: pip install 'qworker[{extra}]'"),
        ("redis.md", "```sh\npip install --no-cache-dir \\\n    redis qworker\n```"),
        ("Dockerfile", "RUN pip --python /venv/bin/python install --compile qworker==2.0.7 && true"),
        ("requirements.txt", "redis\nqworker  # the worker\n"),
        ("env.yaml", '- pip: ["qworker[redis]"]'),
        ("pyproject.toml", '[project]\ndependencies = ["qworker>=2"]\n'),
        ("tool.sh", "uv pip install qworker"),
    ],
)
def test_a_hint_that_fetches_the_foreign_project_is_found(name: str, text: str) -> None:
    assert list(foreign_requirements(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "`pip install '.[redis]'`, and then `qworker run`"),
        ("README.md", "pip install . && qworker --help"),
        ("README.md", "pip install dist/qworker_tasks-0.1.0-py3-none-any.whl"),
        ("README.md", "pip install /path/to/qworker"),
        ("README.md", "pip install 'qworker-tasks[redis]'"),
        ("pyproject.toml", '[tool.qworker]\nurl = "file:///var/spool/app"\n'),
    ],
)
def test_a_hint_that_installs_this_project_is_none(name: str, text: str) -> None:
    assert list(foreign_requirements(name, text)) == []


def test_nothing_in_the_tree_installs_the_foreign_project() -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in names.split("\0"):
        path = ROOT / name
        if name and path.is_file() and path != Path(__file__).resolve():
            found += [f"{name}: {hint}" for hint in foreign_requirements(name, path.read_text(errors="replace"))]
    assert not found, "the package index has another project under this name: " + "; ".join(found)
