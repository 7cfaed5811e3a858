"""Why a message failed: a hidden file next to it in fail/. Each protocol chooses the file's name."""

from __future__ import annotations

from qworker.kit.files import read_file
from qworker.kit.own_files import write_own
from qworker.kit.store_errors import UNREADABLE
from qworker.names import printable

__all__ = ["read_reason", "write_reason"]


def write_reason(fail: int, name: str, reason: str, *, mode: int) -> int:
    """Store a reason.

    Args:
        fail: The open directory.
        name: The name of the hidden file.
        reason: Any text.
        mode: The mode of the file.

    Returns:
        The open descriptor, for a sync.

    Raises:
        OSError: The reason is not stored, and nothing of it is left.
    """
    return write_own(name, fail, reason.encode(errors="surrogatepass"), mode)


def read_reason(fail: int, name: str) -> str | None:
    """Return a reason that any program stored, or None."""
    try:
        raw = read_file(name, fail)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return None
    if raw is None:
        return None
    try:
        return raw.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return printable(raw.decode(errors="replace"))
