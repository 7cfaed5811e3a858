"""How long finished messages are kept: `keep_done=0|1|7d|1000` and `keep_fail=` likewise."""

from __future__ import annotations

import asyncio
import os
import re

import msgspec

from qworker.errors import InvalidURL
from qworker.files import list_names
from qworker_file.layout import QueueDir
from qworker_file.names import reason_name

__all__ = ["Keep", "prune"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE = re.compile(r"(\d{1,9})([smhd])")


class Keep(msgspec.Struct, frozen=True):
    """What is kept."""

    # As given.
    text: str
    # False: removed at once.
    any: bool = True
    # Seconds; None: however old.
    age: float | None = None
    # The newest so many; None: however many.
    count: int | None = None

    @classmethod
    def parse(cls, name: str, text: str) -> Keep:
        """Read an option.

        Raises:
            InvalidURL: it says nothing we know.
        """
        if text in {"0", "1"}:
            return cls(text, any=text == "1")
        if match := _AGE.fullmatch(text):
            return cls(text, age=int(match[1]) * _UNITS[match[2]])
        if text.isascii() and text.isdigit() and len(text) <= 9:
            return cls(text, count=int(text))
        raise InvalidURL(
            f"{name} is 0 (removed at once), 1 (kept), an age like 7d or 12h, or a number like 1000 (the newest), not {text!r}"
        )

    @property
    def limits(self) -> bool:
        """Whether what is kept is removed some day."""
        return self.age is not None or self.count is not None

    @property
    def words(self) -> str:
        """For people."""
        if not self.any:
            return "removed at once"
        if self.age is not None:
            return f"kept for {self.text}"
        return "kept" if self.count is None else f"the newest {self.count} are kept"


async def prune(files: QueueDir, directory: int, keep: Keep, now: float) -> int:
    """Remove what is kept no longer; count it.

    Raises:
        OSError: something cannot be removed.
    """
    finished: list[tuple[float, str]] = []
    for name in await list_names(directory):
        if name[0] == ".":
            continue
        try:
            finished.append((os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime, name))
        except FileNotFoundError:
            # Requeued or removed meanwhile.
            continue
        if len(finished) % 500 == 0:
            await asyncio.sleep(0)
    finished.sort()
    if keep.age is not None:
        old = [name for moment, name in finished if moment < now - keep.age]
    else:
        assert keep.count is not None
        old = [name for _, name in finished[: max(0, len(finished) - keep.count)]]
    count = 0
    for name in old:
        count += _remove(files, directory, name)
        if count % 100 == 0:
            await asyncio.sleep(0)
    return count


def _remove(files: QueueDir, directory: int, name: str) -> bool:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        # A stranger's directory that was put aside: people remove it.
        return False
    if directory == files.fail:
        try:
            os.unlink(reason_name(name), dir_fd=directory)
        except FileNotFoundError:
            pass
    return True
