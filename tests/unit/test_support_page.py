"""What docs/reference/support.md names is what the project asks for and what its tests run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from qworker.kit.file_system import LOCAL
from tests.support.servers import PROGRAMS

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROWS = [line for line in (ROOT / "docs/reference/support.md").read_text().splitlines() if line.startswith("| ")]


def row(name: str) -> str:
    """The cells that follow the first one."""
    (found,) = [line for line in ROWS if line.startswith(f"| {name}")]
    return found


def test_the_pythons_are_those_that_the_project_declares() -> None:
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert re.findall(r"3\.\d+", row("CPython")) == declared


def test_each_requirement_is_the_one_of_the_project() -> None:
    needs: list[str] = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["test"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        needs += extra
    declared = {_bounds(need) for need in needs}
    named = {_bounds(need) for need in re.findall(r"`([a-z][a-z-]*[<>=][^`]*)`", "\n".join(ROWS))}
    assert len(named) == 10
    assert named <= declared


def _bounds(need: str) -> tuple[str, str]:
    requirement = Requirement(need)
    return requirement.name, str(requirement.specifier)


def test_each_server_is_one_that_the_tests_start() -> None:
    started = {program.partition("-")[2] for program in PROGRAMS} - {"server"}
    tested = {*re.findall(r"\d\.\d", row("Redis")), *re.findall(r"\d\.\d", row("Valkey"))}
    # 7.0 is the system's redis-server.
    assert started <= tested
    assert tested <= started | {"7.0"} or not started


def test_the_local_file_systems_are_those_that_the_code_knows() -> None:
    assert set(row("ext2").partition("|")[2].partition("|")[0].strip().split(", ")) == LOCAL
