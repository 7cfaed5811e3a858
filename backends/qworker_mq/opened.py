"""An opened root with everything that works on it."""

from __future__ import annotations

from pathlib import Path

from qworker.clock import Clock
from qworker.kit.directory.in_use import QueuesInUse
from qworker.kit.directory.place import Place
from qworker_mq.admin import Admin
from qworker_mq.browse import Browser
from qworker_mq.daemons import Mover, Trash
from qworker_mq.options import MqOptions
from qworker_mq.publish import Publisher
from qworker_mq.reap import StoreReaper
from qworker_mq.store import Store

__all__ = ["OpenedRoot"]


class OpenedRoot:
    """An opened root.

    Args:
        path: See `Store`.
        clock: See `Store`.
        options: See `Store`.
        in_use: See `Store`.
        has_remote_holders: See `Store`.

    Raises:
        OSError: It cannot be opened.
    """

    # Whether leases end by the descriptors: they end by the names of their files.
    has_leases = False

    def __init__(
        self, path: Path, clock: Clock, options: MqOptions, in_use: QueuesInUse, *, has_remote_holders: bool
    ) -> None:
        store = self.store = Store(path, clock, options, in_use, has_remote_holders=has_remote_holders)
        self.mover, self.trash = Mover(store), Trash(store)
        self.reaper = StoreReaper(store, self.mover, self.trash)
        self.publisher = Publisher(store)
        self.browser = Browser(store, self.reaper)
        self.admin = Admin(store, self.reaper, self.trash, self.browser)

    @property
    def place(self) -> Place:
        """Where the root is."""
        return self.store.place

    def wake_all(self) -> None:
        """End all waits."""
        self.store.wake_all()

    async def aclose(self) -> None:
        """Finish what is being unlinked, and close the directories."""
        await self.trash.aclose()
        await self.store.aclose()
