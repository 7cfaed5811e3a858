"""fsq 0.2.5, the released programs under Python 2.7, for tests that share queues with them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["PATIENCE", "Fsq", "install_fsq"]

REQUIREMENTS = ["fsq==0.2.5", "jsonrpclib==0.1.7"]
PATIENCE = 60.0


def _python2() -> str:
    found = os.environ.get("QWORKER_TEST_PYTHON2") or shutil.which("python2.7")
    # pyenv puts a stub on the path whether or not the version is selected.
    stubs = (
        [found]
        if found and subprocess.run([found, "-c", "pass"], capture_output=True, check=False).returncode == 0
        else []
    )
    choices = stubs or [str(path) for path in sorted(Path.home().glob(".pyenv/versions/2.7*/bin/python2.7"))]
    assert choices, "fsq 0.2.5 needs a Python 2.7: install one, and name it in QWORKER_TEST_PYTHON2"
    return choices[-1]


def install_fsq() -> tuple[str, Path]:
    """A Python 2.7 and the folder that has fsq 0.2.5; installed once per machine, shared by parallel test processes."""
    python = _python2()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or tempfile.gettempdir()) / "qworker-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / "fsq-0.2.5"
    with open(cache / "fsq-0.2.5.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            install = [python, "-m", "pip", "install", "-q", "--target", str(folder), *REQUIREMENTS]
            subprocess.run(install, check=True, capture_output=True, timeout=240)
            (folder / "complete").touch()
    return python, folder


class Fsq:
    """fsq's own programs on one root."""

    def __init__(self, fsq: tuple[str, Path], root: Path, **variables: str) -> None:
        self._python, self._folder = fsq
        self._env = {**os.environ, "PYTHONPATH": str(self._folder), "FSQ_ROOT": str(root), **variables}

    async def start(
        self, program: str, *arguments: str, output: int = asyncio.subprocess.PIPE
    ) -> asyncio.subprocess.Process:
        """Start a program."""
        return await asyncio.create_subprocess_exec(
            self._python,
            str(self._folder / "libexec" / "fsq" / f"{program}.py"),
            *arguments,
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def run(self, program: str, *arguments: str, body: bytes = b"") -> tuple[int, bytes]:
        """Run a program to its end; its status and what it printed."""
        process = await self.start(program, *arguments)
        try:
            output, _ = await asyncio.wait_for(process.communicate(body), PATIENCE)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return process.returncode, output

    async def python(self, code: str) -> bytes:
        """Run code that imports fsq; what it printed."""
        process = await asyncio.create_subprocess_exec(
            self._python, "-c", code, env=self._env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
        assert process.returncode == 0, output
        return output
