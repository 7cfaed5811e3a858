"""The command line without extras: every command is listed, and a call of one that needs an extra says so."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import qworker.cli.main
from qworker.cli.main import COMMANDS, main
from qworker.cli.pipeline import JOBS
from qworker.extras import EXTRAS
from tests.support.processes import environment

# Runs the command line many times in one process to which nothing of an extra can be imported.
BARE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

REFUSED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
from qworker.cli.main import main

for line in sys.stdin.read().splitlines():
    print(f"$ {line}", flush=True)
    print(f"status {main(line.split())}", flush=True)
"""


def bare(folder: Path, *lines: str) -> dict[str, tuple[int, str]]:
    """The status and the output of each command line."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, ",".join(EXTRAS)],
        input="\n".join(lines),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    found = {}
    for part in ("\n" + done.stdout).split("\n$ ")[1:]:
        line, _, rest = part.partition("\n")
        output, _, status = rest.rpartition("status ")
        found[line.strip()] = int(status), output
    return found


def test_the_list_of_commands_needs_no_extra(tmp_path: Path) -> None:
    found = bare(tmp_path, "", "-h", "--help", "pipeline", "pipeline --help")
    for line in ("", "-h", "--help"):
        status, output = found[line]
        assert status == 0
        assert "(needs the extra 'redis')" in output
        for name in COMMANDS:
            assert f"\n  {name} " in output
    for line in ("pipeline", "pipeline --help"):
        assert found[line][0] == 0
        for name in JOBS:
            assert f"\n  {name} " in found[line][1]


def test_every_command_explains_itself_without_extras_or_names_the_extra(tmp_path: Path) -> None:
    names = [
        *COMMANDS,
        *(f"pipeline {job}" for job in JOBS),
        *(f"fsq {name}" for name in ("install", "push", "add-host")),
        "mq mover",
    ]
    found = bare(tmp_path, *(f"{name} --help" for name in names), "rfq --help", "rfq info", "rfq")
    for name in names:
        status, output = found[f"{name} --help"]
        assert status == 0, output
        assert output.startswith(f"Usage: qworker {name} ")
    for line in ("rfq --help", "rfq info", "rfq"):
        status, output = found[line]
        assert status == 2
        assert output.startswith("qworker: qworker rfq needs the extra 'redis': ")
        assert output.count("\n") == 1


def test_a_command_that_is_called_names_the_extra_it_lacks(tmp_path: Path) -> None:
    found = bare(
        tmp_path,
        "stats redis://localhost",
        "serve file://./spool",
        "ui file://./spool",
        "pipeline report ./archive",
        "run app:tasks --loop uvloop",
        "create file://./spool inbox",
        "stats file://./spool",
        "doctor file://./spool",
    )
    for line, extra in (
        ("stats redis://localhost", "redis"),
        ("serve file://./spool", "http"),
        ("ui file://./spool", "ui"),
        ("pipeline report ./archive", "spark"),
    ):
        status, output = found[line]
        assert status == 2, output
        assert f"needs the extra '{extra}'" in output
        assert output.count("\n") == 1
    assert found["stats file://./spool"][0] == 0
    assert found["doctor file://./spool"][0] == 0


def test_a_worker_serves_its_health_without_extras(tmp_path: Path) -> None:
    app = "from qworker import Tasks\ntasks = Tasks('file://./spool')\n\n@tasks.task\ndef add(a: int) -> int: ...\n"
    (tmp_path / "app.py").write_text(app)
    line = "run app:tasks --burst --loop asyncio --health 127.0.0.1:0"
    status, output = bare(tmp_path, line)[line]
    assert status == 0, output
    assert "health_server_started" in output
    assert "health_server_failed" not in output


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("qworker_no_such_module:command", "needs the module 'qworker_no_such_module', which is not installed"),
        ("qworker.cli.main:main", "is not a click command"),
        ("qworker.cli.main:nothing", "cannot be imported: AttributeError"),
        ("tests.e2e.broken_command:command", "cannot be imported: RuntimeError('broken')"),
    ],
)
def test_a_command_of_another_package_that_is_broken_takes_no_other_with_it(
    place: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = qworker.cli.main.entry_points

    def with_theirs(**wanted: str) -> object:
        theirs = EntryPoint("theirs", place, qworker.cli.main.GROUP)
        if wanted.get("name") == "theirs":
            return (theirs,)
        found = real(**wanted)
        return type(found)([*found, theirs]) if "name" not in wanted else found

    monkeypatch.setattr(qworker.cli.main, "entry_points", with_theirs)
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"\n  theirs +\(.*\)\n", listed)
    assert "Run the tasks of an app." in listed
    assert main(["theirs", "--help"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("qworker: qworker theirs")
    assert said in told
    assert told.count("\n") == 1
