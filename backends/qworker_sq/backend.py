"""`sq:` queues: a queue is a topic, and this backend is one of its channels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Self

from qworker.backend import Backend
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BadName, BadURL, NotSupported, QueueNotFound
from qworker.history.directory import directory_history
from qworker.history.store import HISTORY_OPTIONS
from qworker.inotify import Watcher
from qworker.message import Draft, Finished, Lease, QueueStats, Settle, Settlement, State, StoredMessage
from qworker.names import check_id, check_queue, is_queue_name
from qworker.segments.disk import open_directory, store_errors
from qworker.segments.state import NAME_BYTES
from qworker.url import BackendURL
from qworker_sq import administer, consume, parts
from qworker_sq.administer import Ahead
from qworker_sq.channel import Channel
from qworker_sq.ledger import Row
from qworker_sq.topic import Deleted, Known, Topic

__all__ = ["SqBackend"]

_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTIONS = {"channel", "segment_size", "temporary", "sync", *HISTORY_OPTIONS}
_SMALLEST_SEGMENT = 256
_LARGEST_SEGMENT = 1 << 30
# Seconds between looks at the log while nothing wakes us: writers that know nothing of qworker leave no wake.
_LOOK = 0.05


class _Queue(Known):
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


class SqBackend(Backend):
    """Segment logs in a directory; see the module."""

    deviations: ClassVar[Mapping[str, str]] = {
        "priority": "a log has one order",
        "key": "a log keeps no index of keys",
        "empty_bodies": "a record of length 0 is the end of the log",
        "fields": "a record is its bytes alone",
        "arguments": "a record is its bytes alone",
    }

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
        self._path = str(url.directory)
        self._name = channel
        self._temporary = temporary
        self._segment_size = segment_size
        self._durable = durable
        self._clock = clock
        self.history = directory_history(url, self._path, default=False, clock=clock)
        self._root = -1
        self._pool: ThreadPoolExecutor | None = None
        self._queues: dict[str, _Queue] = {}
        self._opening = asyncio.Lock()
        self._watcher: Watcher | None = None
        self._changed = asyncio.Event()

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK) -> Self:
        """`sq:///dir[?channel=default&temporary=0&segment_size=BYTES&sync=full|off]`."""
        url.only(_OPTIONS)
        channel = url.options.get("channel", "default")
        if not _CHANNEL.fullmatch(channel) or len(channel) > NAME_BYTES:
            raise BadURL(
                f"{url.masked}: a channel has 1 to {NAME_BYTES} of A-Z a-z 0-9 . _ - and begins with a letter or digit"
            )
        size = url.integer("segment_size", 0, minimum=_SMALLEST_SEGMENT)
        if size > _LARGEST_SEGMENT:
            raise BadURL(f"{url.masked}: segment_size is at most {_LARGEST_SEGMENT}")
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
        if self._root >= 0:
            return
        with store_errors(f"opening {self._path}"):
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            self._root = open_directory(self._path)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="sq-sync")
        self._watcher = Watcher(self._changed.set)

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
        return self._url.masked

    @property
    def durability(self) -> str:
        """`disk`; `process` with `?sync=off`."""
        return "disk" if self._durable else "process"

    # -- finding queues ----------------------------------------------------------------------------------------------

    async def _found(self, queue: str, *, make: bool = False) -> _Queue | None:
        """A queue, opened where it exists; `make` makes it, and our channel, where they do not."""
        check_queue(queue)
        held = self._queues.get(queue)
        if held is not None and held.channel is not None and held.topic.alive():
            return held
        await self.open()
        async with self._opening:
            return await self._open_queue(queue, make)

    async def _open_queue(self, queue: str, make: bool) -> _Queue | None:
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

    async def _open_topic(self, queue: str) -> _Queue:
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
        held = self._queues[queue] = _Queue(topic)
        if self._watcher is not None:
            self._watcher.add(topic.side)
        return held

    async def _join(self, held: _Queue, make: bool) -> None:
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

    async def _made(self, queue: str) -> _Queue:
        with store_errors(f"making the queue {queue}"):
            held = await self._found(queue, make=True)
        assert held is not None
        return held

    async def _existing(self, queue: str) -> _Queue:
        try:
            with store_errors(f"opening the queue {queue}"):
                held = await self._found(queue)
        except BadName:
            held = None
        if held is None:
            raise QueueNotFound(queue)
        return held

    @contextlib.asynccontextmanager
    async def channel(self, queue: str) -> AsyncGenerator[Channel]:
        """Our channel, held; made on a topic that other programs made, for there is nothing else to say of it."""
        held = await self._existing(queue)
        if held.channel is None:
            held = await self._made(queue)
        channel = held.channel
        assert channel is not None
        with store_errors(f"the queue {queue}"):
            async with channel.section():
                yield channel

    async def _commit(self, channel: Channel, *, wake: bool = False) -> None:
        with store_errors(f"the queue {channel.topic.name}"):
            await channel.commit()
            if wake:
                channel.topic.wake()

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Append messages to the topic, for every channel."""
        check_queue(queue)
        for draft in drafts:
            _check(draft)
        if not drafts:
            return []
        held = self._queues.get(queue)
        if held is not None and held.channel is not None:
            try:
                return await held.topic.publish(drafts)
            except Deleted:
                # It is made again below.
                pass
        return await (await self._made(queue)).topic.publish(drafts)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float) -> list[Lease]:
        """Claim messages, if this process owns the channel or can."""
        held = await self._leasable(queue)
        if held is None or limit < 1:
            return []
        channel = held.channel
        assert channel is not None
        with store_errors(f"leasing from {queue}"):
            async with channel.section():
                if channel.ledger.down or not channel.own():
                    return []
                return consume.claim(channel, limit, visibility)

    async def _leasable(self, queue: str) -> _Queue | None:
        with store_errors(f"opening the queue {queue}"):
            held = await self._found(queue)
        return held if held is not None and held.channel is not None else None

    async def wait(self, queues: Sequence[str], timeout: float) -> None:
        """Wait for a publish, a release, the death of the owner, or the moment at which a message becomes due."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        rest = float("inf")
        while True:
            self._changed.clear()
            due = min([await self._until_work(queue) for queue in queues], default=float("inf"))
            rest = min(rest, loop.time() + due)
            left = min(give_up, rest) - loop.time()
            if due <= 0 or left <= 0:
                return
            try:
                async with asyncio.timeout(min(left, _LOOK)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _until_work(self, queue: str) -> float:
        """Seconds until a queue has something for us, as far as is known now."""
        held = await self._leasable(queue)
        if held is None or held.channel is None:
            return float("inf")
        channel = held.channel
        with store_errors(f"the queue {queue}"):
            channel.follow()
            ledger = channel.ledger
            now = self._clock.time()
            ledger.make_due(now)
            if ledger.down or not channel.owned():
                return float("inf")
            if ledger.cursor < channel.end() or ledger.next_ready(1):
                return 0.0
            due = ledger.next_due()
            return float("inf") if due is None else max(0.001, due - now)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Renew leases; from any thread."""
        lost: list[Lease] = []
        by_queue: dict[str, list[Lease]] = {}
        for lease in leases:
            by_queue.setdefault(lease.message.queue, []).append(lease)
        for queue, some in by_queue.items():
            held = self._queues.get(queue)
            if held is None or held.channel is None or not held.topic.alive():
                lost += some
                continue
            with store_errors(f"extending leases of {queue}"), held.channel.blocking_section():
                lost += consume.renew(held.channel, some, self._clock.time() + visibility)
        return lost

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        by_queue: dict[str, list[Settlement]] = {}
        for settlement in settlements:
            by_queue.setdefault(settlement.lease.message.queue, []).append(settlement)
        refused: list[Settlement] = []
        for queue, some in by_queue.items():
            held = await self._leasable(queue)
            if held is None or held.channel is None:
                refused += some
            else:
                refused += await self._settle(held.channel, some)
        return refused

    async def _settle(self, channel: Channel, settlements: list[Settlement]) -> list[Settlement]:
        done: list[tuple[int, int]] = []
        wake = any(settlement.how in {Settle.RELEASE, Settle.FAIL_TMP} for settlement in settlements)
        try:
            with store_errors(f"settling messages of {channel.topic.name}"):
                async with channel.section():
                    refused = consume.settle(channel, settlements, self._clock.time(), done)
            if done:
                await self._commit(channel, wake=wake)
        except BaseException:
            # Done, but perhaps not for good: a repetition is told so, and makes it durable.
            channel.unsure.update(done)
            raise
        return refused

    async def reap(self, queue: str) -> int:
        """Return what has expired, and what is due."""
        held = await self._leasable(queue)
        if held is None or held.channel is None:
            return 0
        channel = held.channel
        with store_errors(f"reaping {queue}"):
            async with channel.section():
                count = consume.expire(channel, self._clock.time())
            if count:
                channel.topic.wake()
        return count

    # -- administering -----------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """The topics."""
        await self.open()
        with store_errors(f"listing {self._path}"):
            return sorted(name for name in os.listdir(self._root) if is_queue_name(name) and self._is_queue(name))

    async def create(self, queue: str) -> None:
        """Make a topic, and our channel of it."""
        await self._made(check_queue(queue))

    async def delete(self, queue: str) -> None:
        """Remove a topic, with all of its channels."""
        await self.open()
        check_queue(queue)
        held = self._queues.pop(queue, None)
        if held is not None:
            await held.finish()
        if not self._is_queue(queue):
            return
        gone = f".{secrets.token_hex(8)}.gone"
        with store_errors(f"deleting the queue {queue}"):
            try:
                os.rename(queue, gone, src_dir_fd=self._root, dst_dir_fd=self._root)
            except FileNotFoundError:
                return
            os.fsync(self._root)
            await asyncio.get_running_loop().run_in_executor(self._pool, shutil.rmtree, f"{self._path}/{gone}")

    async def delete_channel(self, queue: str) -> None:
        """Remove our channel from a topic, so that it holds no segments any more. Idempotent.

        Raises:
            QueueNotFound: there is no such topic.
        """
        held = await self._existing(queue)
        self._queues.pop(queue, None)
        index = held.topic.state.find(self._name.encode())
        with store_errors(f"deleting the channel {self._name} of {queue}"):
            if held.channel is not None:
                await held.channel.finish()
            async with held.topic.locked():
                if index is not None and not self._temporary:
                    held.topic.state.free(index)
                    os.fsync(held.topic.state.fd)
                    shutil.rmtree(f"{self._path}/{queue}/.qworker/channels/{self._name}", ignore_errors=False)
            await held.topic.trim()
            await held.topic.finish()

    async def stats(self, queue: str) -> QueueStats:
        """Count. The log ahead is walked once, in slices; later counts walk what is new."""
        async with self.channel(queue) as channel:
            pass
        held = self._queues[queue]
        with store_errors(f"the queue {queue}"):
            ahead = await held.ahead.count(channel)
            async with channel.section():
                now = self._clock.time()
                ledger = channel.ledger
                ledger.make_due(now)
                waiting = len(administer.ahead_delayed(channel, now))
                counts = {state: sum(1 for entry in ledger.open.values() if entry.state is state) for state in State}
                ready = counts[State.READY] + max(0, ahead - waiting - len(ledger.skipped))
                down, failed = ledger.down, len(ledger.failed)
            first = await self._first_ready(channel) if ready else None
        return QueueStats(
            queue=queue,
            ready=ready,
            leased=counts[State.LEASED],
            delayed=counts[State.DELAYED] + waiting,
            fail=failed,
            oldest_age=None if first is None else max(0.0, now - first.message.enqueued_at),
            down=down,
            retention=self.history.retention,
        )

    async def _first_ready(self, channel: Channel) -> StoredMessage | None:
        return next(iter(await self._browse_ready(channel, 1, 0)), None)

    async def browse(self, queue: str, state: State, limit: int = 100, offset: int = 0) -> list[StoredMessage]:
        """Look at messages."""
        now = self._clock.time()
        async with self.channel(queue) as channel:
            channel.ledger.make_due(now)
            if state is State.FAIL:
                failed = channel.ledger.failed
                places = sorted(failed, key=lambda place: (failed[place].at, place))
            elif state is State.DELAYED:
                places = [*channel.ledger.in_state(state), *administer.ahead_delayed(channel, now)]
            else:
                places = list(channel.ledger.in_state(state))
            if state is not State.READY:
                found = [administer.stored(channel, place, now) for place in places]
                seen = [one for one in found if one is not None]
                if state is State.DELAYED:
                    seen.sort(key=lambda one: one.due_at or 0.0)
                return seen[offset : offset + limit]
        return await self._browse_ready(channel, limit, offset)

    async def _browse_ready(self, channel: Channel, limit: int, offset: int) -> list[StoredMessage]:
        now = self._clock.time()
        returned = channel.ledger.in_state(State.READY)
        found = [one for place in returned if (one := administer.stored(channel, place, now)) is not None]
        passed = len(found)
        found = found[offset : offset + limit]
        if len(found) < limit:
            async for place, payload in administer.ready_ahead(channel, now):
                passed += 1
                if passed > offset:
                    found.append(
                        StoredMessage(message=consume.make_message(channel, place, payload), state=State.READY)
                    )
                    if len(found) >= limit:
                        break
        return found

    async def find(self, queue: str, message_id: str) -> StoredMessage | None:
        """Look at one message."""
        async with self.channel(queue) as channel:
            now = self._clock.time()
            channel.ledger.make_due(now)
            place = administer.locate(channel, message_id)
            return None if place is None else administer.stored(channel, place, now)

    async def browse_parts(self, queue: str, state: State, wanted: int) -> list[str]:
        """Stretches of the log, and what was handed out."""
        async with self.channel(queue) as channel:
            return parts.divide(channel, state, wanted)

    async def browse_part(self, queue: str, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Look at one stretch, or at what was handed out. The channel is not held meanwhile."""
        now = self._clock.time()
        async with self.channel(queue) as channel:
            channel.ledger.make_due(now)
        with store_errors(f"the queue {queue}"):
            found = (
                parts.held(channel, state, now)
                if part == parts.HELD
                else parts.ready_in(channel, parts.Stretch.parse(part), now)
            )
            async for page in found:
                yield page

    async def discard(self, queue: str, found: Sequence[Finished]) -> int:
        """Delete failed messages that are as they were found, for our channel."""
        async with self.channel(queue) as channel:
            count = administer.remove_places(channel, parts.failed_as_found(channel, found))
        if count:
            await self._commit(channel)
        return count

    async def requeue(self, queue: str, ids: Iterable[str] | None = None) -> int:
        """Make failed messages ready."""
        async with self.channel(queue) as channel:
            count = administer.requeue(channel, ids)
        if count:
            await self._commit(channel, wake=True)
        return count

    async def remove(self, queue: str, ids: Iterable[str]) -> int:
        """Delete messages for our channel; other channels keep theirs."""
        async with self.channel(queue) as channel:
            count = administer.remove(channel, ids)
        if count:
            await self._commit(channel)
        return count

    async def purge(self, queue: str, state: State | None = None) -> int:
        """Delete messages by state, for our channel."""
        states = {State.READY, State.DELAYED, State.FAIL} if state is None else {state}
        ready = 0
        if State.READY in states:
            before = await self.stats(queue)
            async with self.channel(queue) as channel:
                ready = before.ready - len(list(channel.ledger.in_state(State.READY)))
        async with self.channel(queue) as channel:
            now = self._clock.time()
            channel.ledger.make_due(now)
            count = administer.purge(channel, states, now, ready)
        if count:
            await self._commit(channel)
        return count

    async def down(self, queue: str) -> None:
        """Pause our channel."""
        await self._pause(queue, True)

    async def up(self, queue: str) -> None:
        """Resume our channel."""
        await self._pause(queue, False)

    async def _pause(self, queue: str, down: bool) -> None:
        async with self.channel(queue) as channel:
            if channel.ledger.down != down:
                channel.append([[Row.PAUSE, down]])
        await self._commit(channel, wake=True)


def _check(draft: Draft) -> None:
    if draft.priority:
        raise NotSupported("sq: has no priorities: a log has one order; use another queue for what is urgent")
    if draft.key is not None:
        raise NotSupported("sq: has no keys: a log keeps no index of them; give the message an id instead")
    if not draft.body:
        raise NotSupported("sq: has no empty messages: a record of length 0 ends the log")
    if draft.fields or draft.arguments:
        raise NotSupported("sq: has no place for fields and arguments: put them into the body")
    if draft.id is not None:
        check_id(draft.id)
