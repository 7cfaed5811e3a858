"""Making queues with more than the backend contract knows: an entry point in the group `qworker.installers`, keyed by URL scheme.

Such an entry point is a callable that takes the `BackendURL`, a queue and the `InstallOptions`, and makes that queue.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

import msgspec

from qworker.url import BackendURL

__all__ = ["GROUP", "InstallOptions", "Installer", "installer"]

GROUP = "qworker.installers"


class InstallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a queue is made."""

    # Paused from the beginning.
    down: bool = False
    # One that is there is left as it is; else it is an error, where the protocol says so.
    ignore_exists: bool = False
    # One that is there is removed first, with all its messages.
    force: bool = False
    # With a FIFO that wakes a scanner.
    triggered: bool = False
    owner: str | None = None
    group: str | None = None
    # Octal.
    mode: str | None = None
    # With sub-queues for these.
    hosts: tuple[str, ...] = ()

    @property
    def special(self) -> str | None:
        """The first option that only some protocols know."""
        for name in ("force", "triggered", "owner", "group", "mode", "hosts"):
            if getattr(self, name):
                return "add-host" if name == "hosts" else name
        return None


Installer = Callable[[BackendURL, str, InstallOptions], None]


def installer(scheme: str) -> Installer | None:
    """The installer of a scheme; None where queues are made by the backend itself."""
    for point in entry_points(group=GROUP, name=scheme):
        return cast("Installer", point.load())
    return None
