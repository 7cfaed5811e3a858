"""Topics and channels as administrators see them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence

from qworker.files import hide_directory, store_errors
from qworker.message import QueueStats, Selection, State, StoredMessage
from qworker.names import check_queue, is_queue_name
from qworker_sq import consume, contents, parts
from qworker_sq.channel import Channel
from qworker_sq.ledger import Row
from qworker_sq.topics import SqTopics

__all__ = ["SqAdministration"]


class SqAdministration(SqTopics):
    """The part of the backend that makes, deletes, counts and looks."""

    async def queues(self) -> list[str]:
        """The topics."""
        if not self._open(make=False):
            return []
        with store_errors(f"list {self._path}"):
            return sorted(name for name in os.listdir(self._root) if is_queue_name(name) and self._is_queue(name))

    async def create(self, queue: str) -> None:
        """Make a topic, and our channel of it."""
        await self._made(check_queue(queue))

    async def delete(self, queue: str) -> None:
        """Remove a topic, with all of its channels."""
        check_queue(queue)
        if not self._open(make=False):
            return
        held = self._queues.pop(queue, None)
        if held is not None:
            await held.finish()
        if not self._is_queue(queue):
            return
        with store_errors(f"delete the queue {queue}"):
            hidden = hide_directory(queue, self._root)
            if hidden is not None:
                await asyncio.get_running_loop().run_in_executor(self._pool, shutil.rmtree, f"{self._path}/{hidden}")

    async def delete_channel(self, queue: str) -> None:
        """Remove our channel from a topic, so that it holds no segments any more. Idempotent.

        Raises:
            QueueNotFound: there is no such topic.
        """
        held = await self._existing(queue)
        self._queues.pop(queue, None)
        index = held.topic.state.find(self._name.encode())
        with store_errors(f"delete the channel {self._name} of {queue}"):
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
        with store_errors(f"use the queue {queue}"):
            ahead = await held.ahead.count(channel)
            async with channel.section():
                now = self._clock.time()
                ledger = channel.ledger
                ledger.make_due(now)
                waiting = len(contents.ahead_delayed(channel, now))
                counts = {state: sum(1 for entry in ledger.open.values() if entry.state is state) for state in State}
                ready = counts[State.READY] + max(0, ahead - waiting - len(ledger.skipped))
                down, failed = ledger.down, len(ledger.failed)
            first = await self._first_ready(channel) if ready else None
        return QueueStats(
            queue=queue,
            ready=ready,
            leased=counts[State.LEASED],
            delayed=counts[State.DELAYED] + waiting,
            failed=failed,
            oldest_age_s=None if first is None else max(0.0, now - first.message.enqueued_at),
            paused=down,
            retention=self.history.retention,
        )

    async def _first_ready(self, channel: Channel) -> StoredMessage | None:
        return next(iter(await self._browse_ready(channel, 1, 0)), None)

    async def browse(self, queue: str, state: State, limit: int = 100, offset: int = 0) -> list[StoredMessage]:
        """Look at messages."""
        now = self._clock.time()
        async with self.channel(queue) as channel:
            channel.ledger.make_due(now)
            if state is State.FAILED:
                failed = channel.ledger.failed
                places = sorted(failed, key=lambda place: (failed[place].at, place))
            elif state is State.DELAYED:
                places = [*channel.ledger.in_state(state), *contents.ahead_delayed(channel, now)]
            else:
                places = list(channel.ledger.in_state(state))
            if state is not State.READY:
                found = [contents.stored(channel, place, now) for place in places]
                seen = [one for one in found if one is not None]
                if state is State.DELAYED:
                    seen.sort(key=lambda one: one.due_at or 0.0)
                return seen[offset : offset + limit]
        return await self._browse_ready(channel, limit, offset)

    async def _browse_ready(self, channel: Channel, limit: int, offset: int) -> list[StoredMessage]:
        now = self._clock.time()
        returned = channel.ledger.in_state(State.READY)
        found = [one for place in returned if (one := contents.stored(channel, place, now)) is not None]
        passed = len(found)
        found = found[offset : offset + limit]
        if len(found) < limit:
            async for place, payload in contents.ready_ahead(channel, now):
                passed += 1
                if passed > offset:
                    found.append(
                        StoredMessage(message=consume.make_message(channel, place, payload), state=State.READY)
                    )
                    if len(found) >= limit:
                        break
        return found

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        async with self.channel(queue) as channel:
            now = self._clock.time()
            channel.ledger.make_due(now)
            places = [contents.locate(channel, one) for one in dict.fromkeys(ids)]
            found = [contents.stored(channel, place, now) for place in places if place is not None]
            return [stored for stored in found if stored is not None]

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Stretches of the log, and what was handed out."""
        async with self.channel(queue) as channel:
            return parts.divide(channel, state, count)

    async def browse_part(self, queue: str, state: State, part: str) -> AsyncIterator[list[StoredMessage]]:
        """Look at one stretch, or at what was handed out. The channel is not held meanwhile."""
        now = self._clock.time()
        async with self.channel(queue) as channel:
            channel.ledger.make_due(now)
        with store_errors(f"use the queue {queue}"):
            found = (
                parts.held(channel, state, now)
                if part == parts.HELD
                else parts.ready_in(channel, parts.Stretch.parse(part), now)
            )
            async for page in found:
                yield page

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        async with self.channel(queue) as channel:
            count = contents.requeue(channel, selection)
        if count:
            await self._commit(channel, wake=True)
        return count

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages for our channel; other channels keep theirs."""
        ahead = await self._count_ahead(queue) if selection.state is State.READY else 0
        async with self.channel(queue) as channel:
            if selection.state is None:
                count = contents.remove(channel, selection)
            else:
                now = self._clock.time()
                channel.ledger.make_due(now)
                count = contents.remove_state(channel, selection.state, now, ahead)
        if count:
            await self._commit(channel)
        return count

    async def _count_ahead(self, queue: str) -> int:
        """The ready messages that were never handed out."""
        before = await self.stats(queue)
        async with self.channel(queue) as channel:
            return before.ready - len(list(channel.ledger.in_state(State.READY)))

    async def pause(self, queue: str) -> None:
        """Pause our channel."""
        await self._pause(queue, True)

    async def resume(self, queue: str) -> None:
        """Resume our channel."""
        await self._pause(queue, False)

    async def _pause(self, queue: str, down: bool) -> None:
        async with self.channel(queue) as channel:
            if channel.ledger.down != down:
                channel.append([[Row.PAUSE, down]])
        await self._commit(channel, wake=True)
