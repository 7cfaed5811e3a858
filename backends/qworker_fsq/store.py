"""The root directory that one backend instance has open, and the data that its queues share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import ClassVar

from qworker.clock import Clock
from qworker.errors import BackendError
from qworker.kit.directory.store import DirectoryStore
from qworker.kit.directory.waiter import Waiter
from qworker.kit.files import files_at_once
from qworker.names import check_queue
from qworker_fsq.environment import group_id, user_id
from qworker_fsq.layout import QueueExists, add_missing_parts, has_queue, install, install_host, open_queue, queue_path
from qworker_fsq.open_queue import MOST_LINGERING, OpenQueue
from qworker_fsq.options import FsqOptions
from qworker_fsq.publish_plan import Planner

__all__ = ["Store"]

# Attempts to create a queue that other processes delete and create all the time.
_ATTEMPTS = 10


class Store(DirectoryStore[OpenQueue]):
    """An open root.

    Args:
        directory: Its path. It is created if it does not exist.
        clock: The store's clock.
        options: The options of the URL.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, directory: str, clock: Clock, options: FsqOptions) -> None:
        super().__init__(directory, clock, mode=0o775, sync=options.sync, shared=options.shared)
        constants = options.constants
        self.options = options
        self.limits = options.limits
        self.planner = Planner(constants)
        self.files_at_once = files_at_once()
        # The owner of new items.
        self.owner = (user_id(constants.item_user), group_id(constants.item_group))
        self._listening: set[int] = set()

    # -- queues ------------------------------------------------------------------------------------------------------

    descriptors: ClassVar[int] = 6

    @property
    def parts_of_ready(self) -> Mapping[str, str]:
        """The directory of the items."""
        path, constants = queue_path("", self.options.host, self.options.constants), self.options.constants
        return {f"{path}/{constants.queue}".lstrip("/"): ""}

    @property
    def parts_to_reap(self) -> Mapping[str, str]:
        """None: the lock of an item ends with its process."""
        return {}

    def _has_queue(self, name: str) -> bool:
        return has_queue(self.root, name, self.options.host, self.options.constants)

    def _open_queue(self, name: str) -> OpenQueue | None:
        files = open_queue(self.root, name, self.options.constants, self.options.host)
        if files is None:
            return None
        files.max_body = self.options.max_body
        return OpenQueue(
            files,
            self.clock,
            self.limits,
            self._inotify,
            local_disk=self.is_local,
            most_lingering=min(MOST_LINGERING, self.most_held // 4),
        )

    async def aclose(self) -> None:
        """Close everything, after the running commits and when the last items have been finished for a moment."""
        pause = max([queue.until_closable() for queue in self._queues.values()], default=0.0)
        try:
            if pause:
                await asyncio.sleep(pause)
        finally:
            await super().aclose()

    def get_or_create(self, name: str) -> OpenQueue:
        """Return an open queue, which is created if it does not exist.

        Raises:
            OSError: It cannot be created or opened.
            BackendError: A part of it is missing.
        """
        queue = self.get(name)
        for _ in range(_ATTEMPTS):
            if queue is not None:
                return queue
            self._create(name)
            queue = self.get(name)
        if queue is None:
            constants = self.options.constants
            parts = " ".join((constants.tmp, constants.queue, constants.done, constants.fail))
            raise BackendError(
                f"the queue {name!r} is incomplete: create its missing directory ({parts}), or delete the queue"
            )
        return queue

    def _create(self, name: str) -> None:
        options = self.options
        try:
            if not has_queue(self.root, name, None, options.constants):
                install(self.root, check_queue(name), options.constants, durable=options.sync)
            else:
                add_missing_parts(self.root, name, options.constants)
            if options.host is not None:
                install_host(self.root, name, options.constants, (options.host,))
        except QueueExists:
            # Another process was faster, or a directory of the queue was removed, or it is not a queue, and then this
            # raises.
            if not add_missing_parts(self.root, name, options.constants) and not self._has_queue(name):
                raise

    # -- wake-ups ----------------------------------------------------------------------------------------------------

    def notify(self, queue: OpenQueue, *, trigger: bool = False) -> None:
        """Wake the waiters of a queue that may have work.

        Args:
            queue: The queue.
            trigger: Whether the processes that listen on its trigger are woken too.
        """
        self.wake_waiters(queue.files.name)
        if trigger:
            queue.files.pull_trigger()

    def listen(self, queue: OpenQueue) -> None:
        """Listen to a queue's trigger, if it has one, until there are no more waits."""
        if queue.trigger >= 0 and queue.trigger not in self._listening:
            self._listening.add(queue.trigger)
            asyncio.get_running_loop().add_reader(queue.trigger, self._on_trigger, queue)

    def remove_waiter(self, waiter: Waiter) -> None:
        """Stop listening for a wait. After the last one, the triggers are left to other processes."""
        super().remove_waiter(waiter)
        if not self._waiters:
            for trigger in tuple(self._listening):
                self._leave_trigger(trigger)

    def _stop_listening(self, queue: OpenQueue) -> None:
        self._leave_trigger(queue.trigger)

    def _leave_trigger(self, trigger: int) -> None:
        if trigger in self._listening:
            self._listening.discard(trigger)
            asyncio.get_running_loop().remove_reader(trigger)

    def _on_trigger(self, queue: OpenQueue) -> None:
        try:
            # A FIFO holds no more than this: one wake-up is enough for all of it.
            os.read(queue.trigger, 1 << 16)
        except BlockingIOError:
            # Another listener has read it.
            return
        self.notify(queue)
