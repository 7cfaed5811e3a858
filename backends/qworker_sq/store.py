"""Topics of a directory, and our channel of each: opened when they are first needed, and again when somebody has deleted them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import InvalidName, InvalidURL
from qworker.history.directory import directory_history
from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.directory.missing import is_missing, queue_not_found
from qworker.kit.files import durability_at, store_errors
from qworker.kit.inotify import Watcher
from qworker.kit.segments.disk import open_directory
from qworker.kit.segments.state import NAME_BYTES
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_sq.browse import Ahead
from qworker_sq.channel import Channel
from qworker_sq.topic import Known, Topic

__all__ = ["OpenTopic", "SqTopics"]

_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTIONS = {"channel", "segment_size", "temporary", "sync", *HISTORY_OPTIONS}
_SMALLEST_SEGMENT = 256
_LARGEST_SEGMENT = 1 << 30


class OpenTopic(Known):
    """An open topic with our channel of it."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.channel: Channel | None = None
        self.ahead = Ahead()
        topic.known = self

    def alive(self, place: int) -> bool:
        """See `Known`: as our channel sees it."""
        if self.channel is None:
            return False
        self.channel.follow()
        ledger = self.channel.ledger
        return (
            place in ledger.open or place in ledger.failed or (place >= ledger.cursor and place not in ledger.skipped)
        )

    async def finish(self) -> None:
        """Close both."""
        if self.channel is not None:
            await self.channel.finish()
        await self.topic.finish()


class SqTopics(Backend):
    """The part of the backend that opens, finds and closes."""

    def __init__(
        self,
        url: BackendURL,
        *,
        channel: str = "default",
        temporary: bool = False,
        segment_size: int | None = None,
        durable: bool = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._url = url
        self.directory = url.directory
        self._path = str(self.directory)
        self._name = channel
        self._temporary = temporary
        self._segment_size = segment_size
        self._durable = durable
        self._clock = clock
        self.history = directory_history(url, self._path, default=False, clock=clock)
        self._root = -1
        self._pool: ThreadPoolExecutor | None = None
        self._queues: dict[str, OpenTopic] = {}
        self._opening = asyncio.Lock()
        self._watcher: Watcher | None = None
        self._changed = asyncio.Event()

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """`sq:///dir[?channel=default&temporary=0&segment_size=BYTES&sync=full|off]`."""
        url.only(_OPTIONS)
        channel = url.options.get("channel", "default")
        if not _CHANNEL.fullmatch(channel) or len(channel) > NAME_BYTES:
            raise InvalidURL(
                f"{url.masked}: a channel must have 1 to {NAME_BYTES} of A-Z a-z 0-9 . _ - and start with a letter or digit"
            )
        size = url.integer("segment_size", 0, minimum=_SMALLEST_SEGMENT)
        if size > _LARGEST_SEGMENT:
            raise InvalidURL(f"{url.masked}: segment_size must be at most {_LARGEST_SEGMENT}")
        return cls(
            url,
            channel=channel,
            temporary=url.boolean("temporary", False),
            segment_size=size or None,
            durable=url.choice("sync", "full", ("full", "off")) == "full",
            clock=clock,
        )

    async def open(self) -> None:
        """Make the directory where it is absent, and open it."""
        self._open(make=True)

    def _open(self, *, make: bool) -> bool:
        """Open the directory, which may be made; False where it is not there."""
        if self._root >= 0:
            return True
        if not make and is_missing(self.directory):
            return False
        with store_errors(f"open {self._path}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            self._root = open_directory(self._path)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="sq-sync")
        self._watcher = Watcher(self._changed.set)
        return True

    async def aclose(self) -> None:
        """Finish what is being written, and close; other processes may lease from now on."""
        await self.history.aclose()
        while self._queues:
            await self._queues.popitem()[1].finish()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def describe(self) -> str:
        """The URL."""
        return self._url.at(str(self._path))

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`, and on a file system without a journal or barriers."""
        return durability_at(self._path, sync=self._durable)

    # -- finding queues ----------------------------------------------------------------------------------------------

    async def _found(self, queue: str, *, make: bool = False) -> OpenTopic | None:
        """A queue, opened where it exists; `make` makes it, and our channel, where they do not."""
        check_queue(queue)
        held = self._queues.get(queue)
        if held is not None and held.channel is not None and held.topic.alive():
            return held
        if not self._open(make=make):
            return None
        async with self._opening:
            return await self._open_queue(queue, make)

    async def _open_queue(self, queue: str, make: bool) -> OpenTopic | None:
        held = self._queues.get(queue)
        if held is not None and not held.topic.alive():
            del self._queues[queue]
            await held.finish()
            held = None
        if held is None:
            if not self._is_queue(queue):
                if not make:
                    return None
                with contextlib.suppress(FileExistsError):
                    os.mkdir(queue, 0o700, dir_fd=self._root)
            held = await self._open_topic(queue)
        if held.channel is None:
            await self._join(held, make)
        return held

    def _is_queue(self, name: str) -> bool:
        try:
            return stat.S_ISREG(
                os.stat(f"{name}/state", dir_fd=self._root, follow_symlinks=False).st_mode
            ) and stat.S_ISDIR(os.stat(name, dir_fd=self._root, follow_symlinks=False).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    async def _open_topic(self, queue: str) -> OpenTopic:
        assert self._pool is not None
        topic = Topic(
            self._root,
            queue,
            clock=self._clock,
            segment_size=self._segment_size,
            durable=self._durable,
            pool=self._pool,
        )
        try:
            await topic.open()
        except BaseException:
            topic.close()
            raise
        held = self._queues[queue] = OpenTopic(topic)
        if self._watcher is not None:
            self._watcher.add(topic.side)
        return held

    async def _join(self, held: OpenTopic, make: bool) -> None:
        """Open our channel; a new one begins at the write position."""
        topic = held.topic
        if self._temporary:
            held.channel = Channel(topic, self._name, None)
            return
        index = topic.state.find(self._name.encode())
        if index is None and make:
            async with topic.locked():
                index = topic.state.find(self._name.encode())
                if index is None:
                    index = topic.state.add(self._name.encode(), topic.state.place(0))
                    os.fsync(topic.state.fd)
        if index is not None:
            held.channel = Channel(topic, self._name, index)

    async def _made(self, queue: str) -> OpenTopic:
        with store_errors(f"make the queue {queue}"):
            held = await self._found(queue, make=True)
        assert held is not None
        return held

    async def _existing(self, queue: str) -> OpenTopic:
        try:
            with store_errors(f"open the queue {queue}"):
                held = await self._found(queue)
        except InvalidName:
            held = None
        if held is None:
            raise queue_not_found(queue, self.directory)
        return held

    @contextlib.asynccontextmanager
    async def channel(self, queue: str) -> AsyncGenerator[Channel]:
        """Our channel, held; made on a topic that other programs made, for there is nothing else to say of it."""
        held = await self._existing(queue)
        if held.channel is None:
            held = await self._made(queue)
        channel = held.channel
        assert channel is not None
        with store_errors(f"use the queue {queue}"):
            async with channel.section():
                yield channel

    async def _commit(self, channel: Channel, *, wake: bool = False) -> None:
        with store_errors(f"use the queue {channel.topic.name}"):
            await channel.commit()
            if wake:
                channel.topic.wake()
