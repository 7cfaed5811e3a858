"""The check of `qworker doctor` for messages that are not leased because they are larger than `max_body`."""

from __future__ import annotations

from collections.abc import Iterable

from qworker.kit.doctor_check import Check, CheckStatus
from qworker.names import counted, printable
from qworker.size import format_size

__all__ = ["check_sizes"]


def check_sizes(sizes: Iterable[tuple[str, int]], most: int) -> Check:
    """Return the check of `qworker doctor` for stored messages that are not leased because of their size.

    Args:
        sizes: The names of messages that wait, and their bytes.
        most: The largest body in bytes.
    """
    large = [(size, name) for name, size in sizes if size > most]
    if not large:
        return Check("message sizes", CheckStatus.OK, f"no message that waits is known to exceed {format_size(most)}")
    size, name = max(large)
    return Check(
        "message sizes",
        CheckStatus.WARN,
        f"{counted(len(large), 'message')} with more than max_body={format_size(most)} not leased, the largest is"
        f" {printable(name)} with {size} bytes",
        f"set ?max_body={format_size(-(-size // (1 << 20)) << 20)} in the URL of the workers, or remove the messages",
    )
