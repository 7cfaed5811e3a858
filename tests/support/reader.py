"""Somebody who reads a page in an empty folder, and does what it shows.

A command that ends in ` &` runs until the page ends, as in a reader's shell.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from tests.support.pages import ROOT, Block, commands, environment, pages, parsed, sessions, shown
from tests.support.servers import free_port
from tests.support.waiting import wait_for

__all__ = ["PEERS", "Reader"]

PATIENCE = 120.0
# What a page's files lie beside.
BESIDE = dict.fromkeys(["docs/howto/services.md", "docs/howto/after-commit.md"], "examples/django_service") | {
    page: str(Path(page).parent) for page in pages() if page.startswith("examples/")
}
# Pages that install a package.
INSTALL = {"docs/howto/backend.md"}
# Pages whose Python needs Spark: tests/spark runs it.
SPARK = "docs/pipeline/"
# Pages whose Python needs other task queues: tests/e2e/test_coming_from.py runs it.
PEERS = "docs/coming-from/"
# Programs of others.
_PROGRAMS = """
. apt-get arq cat cd celery convert-to-thumbnail cp curl docker dramatiq echo find flask groupadd hostname huey_consumer
journalctl kubectl ls mv openssl pip pkill printf pytest redis-cli rfq rm rq sed seq sh spark-submit sudo systemctl
systemd-analyze useradd uvicorn
"""
PROGRAMS = set(_PROGRAMS.split())
# The ports of pages. Each reader listens on free ones instead.
_PORTS = re.compile(r"\b(?:8000|8080|9090)\b")
# What a module of a Django site needs before it can be imported.
DJANGO = "import os, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'shop.settings'; django.setup(); "


class Reader:
    """Somebody in an empty folder, who does what a page shows."""

    def __init__(self, page: str, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.environment = environment()
        # Python files that are written and not imported yet.
        self.unread: list[str] = []
        # Programs that run until the page ends.
        self.running: list[subprocess.Popen[bytes]] = []
        self.ports: defaultdict[str, int] = defaultdict(free_port)
        if page in INSTALL:
            self._install_elsewhere()
        if page in BESIDE:
            # What a developer's own runs have left there is not part of the example.
            made = shutil.ignore_patterns("__pycache__", "spool", "archive", "*.sqlite*")
            shutil.copytree(ROOT / BESIDE[page], folder, dirs_exist_ok=True, ignore=made)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.running:
            _end(self.running.pop(), signal.SIGTERM)

    def _install_elsewhere(self) -> None:
        """Take an environment of its own, with what is installed in this one; packages are built from what is here."""
        own = self.folder.with_name(f"{self.folder.name}-environment")
        venv.create(own, with_pip=False)
        packages = own / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "this.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        for name in ("pip", "pytest", "qworker"):
            program = own / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(own / "bin" / "python"))} -m {name} "$@"\n')
            program.chmod(0o755)
        path = f"{own / 'bin'}:{self.environment['PATH']}"
        self.environment |= {"PATH": path, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}

    def do(self, block: Block) -> None:
        """Do what a block shows, and check what is to be seen."""
        block = replace(block, text=_PORTS.sub(lambda found: str(self.ports[found[0]]), block.text))
        do = getattr(self, f"_{block.language}", None)
        assert do is not None, f"{self.page}:{block.line}: nothing here proves a block of {block.language!r}"
        if block.language != "python" or block.file in self.unread:
            self.read()
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if block.continues else "w") as file:
                file.write(block.text)
        try:
            do(block)
        except Exception as error:
            error.add_note(f"{self.page}:{block.line}")
            raise

    def _python(self, block: Block) -> None:
        assert block.file is not None, "a Python block begins with `# NAME.py`, because it is run as that file"
        compile((self.folder / block.file).read_text(), block.file, "exec", dont_inherit=True)
        if not self.page.startswith((SPARK, PEERS)):
            self.unread.append(block.file)

    def read(self) -> None:
        """Import the files since the last block that is no file, in one process: a reader has all of them by now."""
        if self.unread:
            modules = ", ".join(dict.fromkeys(file.removesuffix(".py").replace("/", ".") for file in self.unread))
            self.unread.clear()
            first = DJANGO if (self.folder / "manage.py").exists() else ""
            python = shutil.which("python", path=self.environment["PATH"])
            assert python is not None
            self._run([python, "-W", "error", "-c", f"{first}import {modules}"])

    def _console(self, block: Block) -> None:
        for command, expected in sessions(block.text):
            if command.endswith(" &"):
                self.running.append(self._start(command.removesuffix(" &"), expected))
            elif command.startswith("qworker run") and "--burst" not in command:
                # Ctrl-C.
                assert _end(self._start(command, expected), signal.SIGINT) == 0, f"$ {command}"
            else:
                output = self._run(["bash", "-c", command])
                assert shown(expected, output), f"$ {command}\n{output}\nlacks {expected}"

    def _sh(self, block: Block) -> None:
        for command in commands(block.text):
            program, *arguments = command
            if program == "qworker":
                parsed(arguments)
            elif program == "make":
                assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
            elif program.startswith("python"):
                self._names_a_program(arguments)
            elif "/" in program:
                assert (self.folder / program).exists() or (ROOT / program).exists() or ".venv" in program, command
            else:
                assert program in PROGRAMS, f"is {command} right? tests/support/reader.py does not know it"

    _bash = _sh

    def _names_a_program(self, arguments: list[str]) -> None:
        if arguments[0] == "-m":
            assert find_spec(arguments[1]) is not None, arguments
        else:
            assert (self.folder / arguments[0]).is_file(), arguments

    def _toml(self, block: Block) -> None:
        tomllib.loads(block.text)

    def _ini(self, block: Block) -> None:
        configparser.RawConfigParser(strict=False).read_string(block.text)

    def _yaml(self, block: Block) -> None:
        assert list(yaml.safe_load_all(block.text))

    def _json(self, block: Block) -> None:
        json.loads(block.text)

    def _text(self, block: Block) -> None:
        """Prose, in columns."""

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, command: str, expected: list[str]) -> subprocess.Popen[bytes]:
        """Start a program, and wait until its lines have appeared."""
        log = self.folder / f"output-{len(self.running)}.log"
        with log.open("w") as output:
            started = subprocess.Popen(
                shlex.split(command),
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def is_shown() -> bool:
            assert started.poll() is None, f"$ {command}\nended with {started.returncode}:\n{log.read_text()}"
            return shown(expected, log.read_text())

        try:
            wait_for(is_shown, f"$ {command}: shows {expected}", log.read_text, timeout=PATIENCE)
        except BaseException:
            _end(started, signal.SIGKILL)
            raise
        return started


def _end(process: subprocess.Popen[bytes], by: signal.Signals) -> int:
    """End a program by a signal, and return its exit status."""
    process.send_signal(by)
    try:
        return process.wait(PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
