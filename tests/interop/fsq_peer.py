"""fsq 0.2.5, the released programs, for tests that share queues with them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

__all__ = ["PATIENCE", "Fsq"]

PATIENCE = 60.0


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
