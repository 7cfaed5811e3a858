"""A control group with a limit of memory: the kernel kills the largest process in it that needs more."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["memory_group"]

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit: int) -> Generator[list[str] | None]:
    """A group of at most `limit` bytes: the words before a command that starts it inside; None if none can be made."""
    name = f"qworker-bench-{os.getpid()}"
    for parent, file in ((_ROOT / "memory", "memory.limit_in_bytes"), (_ROOT, "memory.max")):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            # Where the controllers are mounted apart, this is a folder of a temporary file system, and limits nothing.
            if (group / file).exists():
                (group / file).write_text(f"{limit}\n")
                yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
                return
        finally:
            group.rmdir()
    yield None
