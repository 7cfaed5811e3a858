"""Two codes in one run: every figure by the old one and by the new one in turns, and whether the new one is worse."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.bench import child_environment
from harness.codes import Code, code_at, code_here, commit_named, last_problem
from harness.disk import measuring_disk
from harness.report import machine
from harness.verdict import LEAST, Comparison, as_document, compared, comparison_table

__all__ = ["against"]

# What one round of a figure found, as `--json` writes it.
_Figures = list[dict[str, Any]]


class _Failed(Exception):
    """A round that could not be measured."""


class _Absent(_Failed):
    """A figure that a code's bench does not have."""


def against(
    commit: str,
    names: Sequence[str],
    *,
    rounds: int,
    quick: bool,
    directory: Path | None,
    json_file: Path | None,
    this_bench: bool,
) -> int:
    """Compare; 0 if nothing is worse (and always with --quick), 1 if something is or a figure failed.

    Raises:
        CannotCompare: one of the codes cannot be had.
    """
    commit = commit_named(commit)
    comparisons: list[Comparison] = []
    problems: dict[str, _Failed] = {}
    with tempfile.TemporaryDirectory(prefix="qworker-against-") as scratch, measuring_disk(directory) as (folder, disk):
        before = machine()
        print("machine: " + ", ".join(f"{name} {value}" for name, value in before.items()))
        print(f"disk: {disk}", flush=True)
        places = [Path(scratch, name) for name in ("old", "new", "cwd")]
        for place in places:
            place.mkdir()
        old, new = code_at(commit, places[0], this_bench=this_bench), code_here(places[1])
        print(f"old: {old.name}\nnew: {new.name}", flush=True)
        for name in names:
            print(f"{name} ...", end=" ", flush=True)
            began = time.monotonic()
            try:
                both = _in_turns((old, new), name, rounds, _Run(places[2], folder, quick))
            except _Failed as problem:
                problems[name] = problem
                print("not compared", flush=True)
                continue
            print(f"{time.monotonic() - began:.0f} s", flush=True)
            found, alone = compared(*both)
            comparisons += found
            for line in alone:
                print(line)
    print(f"\n{comparison_table(comparisons)}\n")
    if json_file:
        about = {"machine": before, "disk": disk, "quick": quick, "against": commit, "rounds": rounds}
        reasons = {name: str(reason) for name, reason in problems.items()}
        json_file.write_text(as_document(comparisons, **about, not_compared=reasons) + "\n")
    for name, reason in problems.items():
        print(f"{name} is not compared: {reason}")
    failed = any(not isinstance(reason, _Absent) for reason in problems.values())
    if quick:
        print("--quick: everything runs, and the figures mean nothing")
        return int(failed)
    worse = sum(one.verdict == "worse" for one in comparisons)
    if worse:
        print(f"{worse} of {len(comparisons)} are worse: below {LEAST} x, and below every round of the old code")
        if before["load"][0] > before["processors"]:
            print("others kept the machine busy when it began: measure again when they do not")
    return int(bool(worse) or failed)


def _in_turns(codes: tuple[Code, Code], name: str, rounds: int, run: _Run) -> tuple[list[_Figures], list[_Figures]]:
    """The rounds of the old code and of the new one, after one of each that does not count."""
    found: tuple[list[_Figures], list[_Figures]] = ([], [])
    for turn in range(rounds + (not run.quick)):
        # The other way round in every second turn, so that neither always follows the other.
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            figures = run(codes[side], name, ("old", "new")[side])
            if turn or run.quick:
                found[side].append(figures)
        print(".", end="", flush=True)
    print(end=" ")
    return found


class _Run:
    """One round of one figure: the code's own bench, as a program.

    Args:
        cwd: an empty folder: Python would import what lies in the one where it is started.
        folder: where to measure.
        quick: small numbers.
    """

    def __init__(self, cwd: Path, folder: Path, quick: bool) -> None:
        self._cwd = cwd
        self._folder = folder
        self.quick = quick

    def __call__(self, code: Code, name: str, side: str) -> _Figures:
        target = self._cwd.parent / "round.json"
        command = [str(code.python), str(code.run), "--own", "--only", name]
        command += ["--directory", str(self._folder), "--json", str(target)]
        # What the round before has left to be written is not this one's.
        subprocess.run(["sync", "-f", str(self._folder)], check=True)
        done = subprocess.run(
            [*command, "--quick"] if self.quick else command,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=self._cwd,
            env=child_environment(),
        )
        # As argparse refuses a value.
        if done.returncode == 2 and "--only" in done.stderr:
            raise _Absent(f"the {side} code's bench does not have it")
        if done.returncode:
            raise _Failed(f"the {side} code's bench fails: {last_problem(done.stderr)}")
        found: _Figures = json.loads(target.read_text())["figures"]
        return found
