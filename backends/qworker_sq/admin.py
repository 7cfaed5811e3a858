"""Topics and channels as administrators see them."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Sequence

import msgspec

from qworker.kit.browse import Chosen, Place, at_most, browse_rows, first, place_of, position_of
from qworker.kit.files import hide_directory, store_errors
from qworker.kit.parts import pages
from qworker.message import Query, QueueStats, Selection, State, StoredMessage
from qworker.names import check_queue, is_queue_name
from qworker_sq import browse as contents
from qworker_sq import parts
from qworker_sq.channel import Channel
from qworker_sq.lease import make_message
from qworker_sq.ledger import Row
from qworker_sq.store import SqTopics

__all__ = ["SqAdministration"]

# The time that orders a message in its state, and its place in the log.
_Row = tuple[float, int]


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
            page = await anext(_browse_ready(channel, Query(State.READY, limit=1), now), None) if ready else None
        return QueueStats(
            queue=queue,
            ready=ready,
            leased=counts[State.LEASED],
            delayed=counts[State.DELAYED] + waiting,
            failed=failed,
            oldest_age_s=None if page is None else max(0.0, now - page[0].message.enqueued_at),
            paused=down,
            retention=self.history.retention,
        )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages. The channel is not held meanwhile."""
        now = self._clock.time()
        async with self.channel(queue) as channel:
            channel.ledger.make_due(now)
        with store_errors(f"use the queue {queue}"):
            if query.part is not None:
                found = at_most(query.limit, parts.read(channel, query.state, query.part, now))
            elif query.state is not State.READY:
                found = self._browse_timed(channel, query, now)
            else:
                found = (_browse_from_the_end if query.newest else _browse_ready)(channel, query, now)
            async for page in found:
                yield page

    async def _browse_timed(self, channel: Channel, query: Query, now: float) -> AsyncIterator[list[StoredMessage]]:
        async def choose(after: Place | None, limit: int | None) -> list[_Row]:
            chosen = Chosen(_place, after, limit, newest=query.newest)
            async with self.channel(channel.topic.name):
                chosen.add(contents.timed(channel, query.state, now))
            return chosen.rows()

        def read(row: _Row) -> StoredMessage | None:
            return _in_state(channel, row[1], query.state, now)

        # Extending a lease changes its expiry.
        identity = _log_place if query.state is State.LEASED else None
        async for page in browse_rows(query, choose, _place, read, identity=identity):
            yield page

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


def _place(row: _Row) -> Place:
    return row[0], f"{row[1]:030}"


def _log_place(row: _Row) -> int:
    return row[1]


def _in_state(channel: Channel, place: int, state: State, now: float) -> StoredMessage | None:
    """The message at a place, if it is in a state."""
    stored = contents.stored(channel, place, now)
    return stored if stored is not None and stored.state is state else None


def _ready(channel: Channel, place: int, now: float) -> StoredMessage | None:
    stored = _in_state(channel, place, State.READY, now)
    return None if stored is None else msgspec.structs.replace(stored, position=position_of((place, "")))


def _log_place_after(query: Query) -> int | None:
    after = place_of(query.after)
    return None if after is None else int(after[0])


async def _browse_ready(channel: Channel, query: Query, now: float) -> AsyncIterator[list[StoredMessage]]:
    """What came back, and then what lies ahead in the log: all of it in the log's order."""
    after = _log_place_after(query) or 0
    returned = [place for place in channel.ledger.in_state(State.READY) if place > after]
    ahead = contents.ready_ahead(channel, now, after)
    found = itertools.chain(
        (_ready(channel, place, now) for place in returned),
        (
            StoredMessage(
                message=make_message(channel, place, payload), state=State.READY, position=position_of((place, ""))
            )
            for place, payload in ahead
        ),
    )
    async for page in pages(first(query.limit, found)):
        yield page


async def _browse_from_the_end(channel: Channel, query: Query, now: float) -> AsyncIterator[list[StoredMessage]]:
    before, left = _log_place_after(query), query.limit

    async def stretches() -> AsyncIterator[list[int]]:
        async for places in contents.ready_from_the_end(channel, now, before):
            yield places
        returned = [place for place in channel.ledger.in_state(State.READY) if before is None or place < before]
        yield returned[::-1]

    async for places in stretches():
        async for page in pages(first(left, (_ready(channel, place, now) for place in places))):
            yield page
            left = None if left is None else left - len(page)
        if left == 0:
            return
