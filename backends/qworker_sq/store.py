"""An open directory with its topics, and our channel of each.

They are opened when they are first needed, and again when they were deleted or replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakSet

from qworker.clock import Clock
from qworker.errors import InvalidName
from qworker.kit.directory.closing import LateCloser, log_replaced
from qworker.kit.directory.in_use import QueuesInUse
from qworker.kit.directory.missing import queue_not_found
from qworker.kit.directory.place import Place
from qworker.kit.directory.root import open_root
from qworker.kit.inotify import Watcher
from qworker.kit.linux import boot_id
from qworker.kit.store_errors import store_errors
from qworker.message import Draft
from qworker.names import check_existing_queue, check_queue
from qworker_sq.channel import Channel
from qworker_sq.options import SqOptions
from qworker_sq.publish import TopicDeleted, TopicPublisher
from qworker_sq.topic import Topic

__all__ = ["OpenTopic", "SqStore"]

# The descriptors of an open topic.
_DESCRIPTORS = 14


class OpenTopic:
    """An open topic with its publisher and our channel of it, if the channel exists."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.channel: Channel | None = None
        # The leases of this instance, which it can extend while the topic is open.
        self.leases: WeakSet[object] = WeakSet()
        self.publisher = TopicPublisher(topic, self._is_stored)

    def _is_stored(self, place: int) -> bool:
        """Return whether a record is ready, delayed, leased or failed, as our channel sees it."""
        if self.channel is None:
            return False
        self.channel.follow()
        ledger = self.channel.ledger
        return (
            place in ledger.open or place in ledger.failed or (place >= ledger.cursor and place not in ledger.skipped)
        )

    async def finish(self) -> None:
        """Finish the writes in progress, and close."""
        if self.channel is not None:
            await self.channel.finish()
        await self.publisher.finish()
        self.topic.close()


class SqStore:
    """The open directory and topics of one backend instance.

    Args:
        directory: Its path. It is created if it does not exist.
        options: The options of the URL.
        clock: The store's clock.

    Attributes:
        topics: The topics that were opened, by name. Another process may have deleted one.
        in_use: The topics that calls use now.
        changed: Set when something has changed in a topic.
        pool: The threads for syncs and deletions.

    Raises:
        OSError: It cannot be opened.
    """

    # Whether leases end by the descriptors: they end by rows of the journal, in which a replaced one has no lease.
    has_leases = False

    def __init__(self, directory: Path, options: SqOptions, clock: Clock) -> None:
        self.directory = directory
        self.path = str(directory)
        self.options = options
        self.clock = clock
        # Without the boot id no topic can be opened. An error here is better than one at each call.
        boot_id()
        self.root = open_root(self.path, 0o700)
        self.place = Place(self.path, self.root)
        self.topics: dict[str, OpenTopic] = {}
        self.in_use = QueuesInUse(_DESCRIPTORS)
        self.changed = asyncio.Event()
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="sq-sync")
        self._opening = asyncio.Lock()
        self._watcher = Watcher(self.changed.set)
        self._replaced = LateCloser()

    def wake_all(self) -> None:
        """End all waits."""
        self.changed.set()

    async def aclose(self) -> None:
        """Finish the writes in progress, and close. Other processes may lease from now on."""
        await self._replaced.aclose()
        while self.topics:
            await self.topics.popitem()[1].finish()
        self._watcher.close()
        self.pool.shutdown(wait=False)
        os.close(self.root)

    # -- topics ------------------------------------------------------------------------------------------------------

    def is_queue(self, name: str) -> bool:
        """Return whether a topic has this name."""
        try:
            return stat.S_ISREG(
                os.stat(f"{name}/state", dir_fd=self.root, follow_symlinks=False).st_mode
            ) and stat.S_ISDIR(os.stat(name, dir_fd=self.root, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    async def get(self, name: str, *, create: bool = False) -> OpenTopic | None:
        """Return a topic; None if it does not exist and must not be created. `create` creates our channel too."""
        check_existing_queue(name)
        topic = self.topics.get(name)
        if topic is not None and topic.channel is not None and topic.topic.is_alive():
            return topic
        async with self._opening:
            while True:
                try:
                    return await self._open_queue(name, create)
                except FileNotFoundError:
                    if os.fstat(self.root).st_nlink == 0:
                        raise
                    # It was deleted while it was being opened.
                    if not create and not self.is_queue(name):
                        return None

    async def get_or_create(self, name: str) -> OpenTopic:
        """Return a topic; it and our channel are created if they do not exist."""
        with store_errors(f"make the queue {name}"):
            topic = await self.get(name, create=True)
        assert topic is not None
        return topic

    async def require(self, name: str) -> OpenTopic:
        """Return a topic.

        Raises:
            QueueNotFound: It does not exist.
        """
        try:
            with store_errors(f"open the queue {name}"):
                topic = await self.get(name)
        except InvalidName:
            topic = None
        if topic is None:
            raise queue_not_found(name, self.directory)
        return topic

    async def _open_queue(self, name: str, create: bool) -> OpenTopic | None:
        topic = self.topics.get(name)
        if topic is not None and not topic.topic.is_alive(now=True):
            if topic.topic.exists:
                log_replaced(os.path.join(self.path, name))
            self.drop(name)
            topic = None
        if topic is None:
            if not self.is_queue(name):
                if not create:
                    return None
                with contextlib.suppress(FileExistsError):
                    os.mkdir(check_queue(name), 0o700, dir_fd=self.root)
            await self._close_oldest()
            topic = await self._open_topic(name)
        if topic.channel is None:
            await self._join(topic, create)
        return topic

    def drop(self, name: str) -> None:
        """Drop a topic that is deleted, or whose directories were removed or replaced."""
        topic = self.topics.pop(name, None)
        if topic is not None:
            self._replaced.add(topic.finish)

    async def _close_oldest(self) -> None:
        """Make room for another topic. No call uses those that are closed, and other processes may lease from them."""
        names = self.in_use.to_close(self.topics, lambda name: bool(self.topics[name].leases))
        # A call that begins while they are closed opens its topic again.
        for topic in [self.topics.pop(name) for name in names]:
            await topic.finish()

    async def _open_topic(self, name: str) -> OpenTopic:
        topic = Topic(
            self.root,
            name,
            clock=self.clock,
            segment_size=self.options.segment_size,
            durable=self.options.durable,
            pool=self.pool,
        )
        try:
            await topic.open()
        except BaseException:
            topic.close()
            raise
        opened = self.topics[name] = OpenTopic(topic)
        self._watcher.add(topic.side)
        return opened

    async def _join(self, opened: OpenTopic, create: bool) -> None:
        """Open our channel. A new one begins at the write position."""
        topic, channel = opened.topic, self.options.channel
        if self.options.temporary:
            opened.channel = Channel(topic, channel, None)
            return
        index = topic.state.find(channel.encode())
        if index is None and create:
            async with topic.locked():
                index = topic.state.find(channel.encode())
                if index is None:
                    index = topic.state.add(channel.encode(), topic.state.place(0))
                    os.fsync(topic.state.fd)
        if index is not None:
            opened.channel = Channel(topic, channel, index)

    # -- our channel -------------------------------------------------------------------------------------------------

    async def get_channel(self, name: str) -> Channel | None:
        """Return our channel of a topic; None if one of them does not exist."""
        with store_errors(f"open the queue {name}"):
            topic = await self.get(name)
        return None if topic is None else topic.channel

    def get_open_channel(self, name: str) -> Channel | None:
        """Return our channel of a topic; None if it is not open, or the topic is deleted."""
        topic = self.topics.get(name)
        return topic.channel if topic is not None and topic.topic.is_alive() else None

    @contextlib.asynccontextmanager
    async def channel_section(self, name: str) -> AsyncGenerator[Channel]:
        """Hold our channel of a topic. It is created if another program created the topic.

        Raises:
            QueueNotFound: The topic does not exist.
        """
        topic = await self.require(name)
        if topic.channel is None:
            topic = await self.get_or_create(name)
        channel = topic.channel
        assert channel is not None
        with store_errors(f"use the queue {name}"):
            try:
                async with channel.section():
                    yield channel
            except FileNotFoundError:
                if topic.topic.is_alive():
                    raise
                raise queue_not_found(name, self.directory) from None

    # -- publishing --------------------------------------------------------------------------------------------------

    async def publish(self, name: str, drafts: Sequence[Draft]) -> list[str]:
        """Append messages to a topic, which is created if it does not exist."""
        topic = self.topics.get(name)
        while True:
            if topic is None or topic.channel is None:
                topic = await self.get(name, create=True)
            assert topic is not None
            try:
                return await topic.publisher.publish(drafts)
            except TopicDeleted:
                # It is created again. The messages in the old one are lost with it.
                topic = None
