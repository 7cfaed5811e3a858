"""Publishing to a topic: the writer with its group commit.

A commit writes records after the write position, makes one fdatasync per touched file in a thread, and then moves the
write position. Publishes that arrive in the meantime are stored by the next commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from zlib import crc32

import msgspec

from qworker.errors import BackendError, BackendUnavailable, NotSupported
from qworker.kit.directory.publish import publish_error
from qworker.kit.store_errors import store_error
from qworker.message import Draft
from qworker_sq.names import place_of_id, position_id
from qworker_sq.record_info import RecordInfo
from qworker_sq.topic import Topic

__all__ = ["TopicDeleted", "TopicPublisher"]

# Bytes of one commit: a turn of the loop writes them, and one sync waits for them.
_COMMIT_BYTES = 1 << 20


class TopicDeleted(BackendUnavailable):
    """The directory of the topic is not that of the queue any more."""


class _PublishRequest(msgspec.Struct, eq=False):
    """One publish that waits for its commit.

    Attributes:
        drafts: The messages.
        done: Receives the ids.
        ids: The ids so far.
        records: The records to write: the index of the id, the payload, the info.
    """

    drafts: Sequence[Draft]
    done: asyncio.Future[list[str]]
    ids: list[str] = []
    records: list[tuple[int, bytes, RecordInfo | None]] = []


class TopicPublisher:
    """Writes messages into an open topic.

    Args:
        topic: The topic. The caller closes it.
        is_stored: Returns whether the record at a place is ready, delayed, leased or failed for our channel.
    """

    def __init__(self, topic: Topic, is_stored: Callable[[int], bool]) -> None:
        self._topic = topic
        self._state, self._log, self._infos = topic.state, topic.log, topic.infos
        self._is_stored = is_stored
        self._room = self._log.room(self._state.place(0))
        self._waiting: list[_PublishRequest] = []
        self._writer: asyncio.Task[None] | None = None

    async def finish(self) -> None:
        """Wait for the writer."""
        while self._writer is not None:
            await asyncio.wait([self._writer])

    def publish(self, drafts: Sequence[Draft]) -> asyncio.Future[list[str]]:
        """Append messages. The result has their ids, and is set when they are durable.

        Raises:
            TopicDeleted: The topic is gone, and nothing was stored. The result raises it.
            BackendError: See `Backend.publish`.
        """
        longest = max([len(draft.body) for draft in drafts])
        if longest > self._room:
            raise NotSupported(
                f"a message must have at most {self._room} bytes to fit into a segment (got {longest}): "
                "open with a larger ?segment_size="
            )
        request = _PublishRequest(drafts, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name=f"sq-writer-{self._topic.name}")
        return request.done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                requests = self._take_requests()
                try:
                    async with self._topic.locked():
                        await self._commit(requests)
                except BackendError as error:
                    _refuse(requests, error)
                except OSError as error:
                    _refuse(requests, self._to_error(error))
        finally:
            self._writer = None
            _refuse(self._waiting, BackendUnavailable(f"the writer of {self._topic.name} has stopped"))

    def _to_error(self, error: OSError) -> BackendError:
        if not self._topic.is_alive(now=True):
            return self._deleted()
        return store_error(error, f"publish to {self._topic.name}")

    def _take_requests(self) -> list[_PublishRequest]:
        size = 0
        count = 0
        for request in self._waiting:
            count += 1
            size += sum(len(draft.body) for draft in request.drafts)
            if size >= _COMMIT_BYTES:
                break
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _commit(self, requests: list[_PublishRequest]) -> None:
        if not self._topic.is_alive():
            raise self._deleted()
        recorded = self._state.place(0)
        if self._log.looks_written(recorded):
            recorded = self._log.recover(recorded, whole=False)
            self._state.move(0, recorded)
        self._infos.file.follow()
        self._resolve(requests, recorded)
        records = [record for request in requests for record in request.records]
        if records:
            end = await self._store(recorded, requests, records)
            self._state.move(0, end)
            self._topic.wake()
        for request in requests:
            if not request.done.done():
                request.done.set_result(request.ids)

    def _deleted(self) -> TopicDeleted:
        return TopicDeleted(f"the queue {self._topic.name} was removed or replaced: publish again")

    def _resolve(self, requests: list[_PublishRequest], end: int) -> None:
        """Leave out the messages that are stored already, and make the infos of the others."""
        chosen: set[str] = set()
        now = self._topic.clock.time()
        for request in requests:
            request.ids, request.records = [], []
            for draft in request.drafts:
                stored = self._find_stored(draft, chosen, end)
                request.ids.append(stored or draft.id or "")
                if stored is None:
                    if draft.id is not None:
                        chosen.add(draft.id)
                    request.records.append((len(request.ids) - 1, draft.body, _make_info(draft, now)))

    def _find_stored(self, draft: Draft, chosen: set[str], end: int) -> str | None:
        if draft.id is None:
            return None
        if draft.id in chosen:
            return draft.id
        place = self._infos.by_id.get(draft.id)
        if place is None:
            place = place_of_id(draft.id)
        elif not self._has_info(place, draft.id, end):
            return None
        return draft.id if place is not None and place < end and self._is_stored(place) else None

    def _has_info(self, place: int, message_id: str, end: int) -> bool:
        """Return whether the info belongs to the present record: a publish that failed may have left it."""
        info = self._infos.by_place.get(place)
        payload = self._log.read_one(place, end)
        return info is not None and info.id == message_id and (payload is None or info.fits(payload))

    async def _store(
        self, at: int, requests: list[_PublishRequest], records: list[tuple[int, bytes, RecordInfo | None]]
    ) -> int:
        try:
            places, end = self._log.plan([len(payload) for _, payload, _ in records], at)
            rows = [
                self._infos.to_row(place, info) for place, (_, _, info) in zip(places, records, strict=True) if info
            ]
            time_row = self._infos.time_row(places[0], self._topic.clock.time())
            if rows or time_row:
                self._infos.file.append([*rows, *([time_row] if time_row else [])])
            if rows and self._topic.durable:
                # The infos are synced before the records: a record without its info would run early, or twice.
                await self._topic.sync_infos()
            self._log.write([payload for _, payload, _ in records], places, at)
        except OSError:
            self._log.undo(at)
            raise
        await self._sync_segments(at)
        following = iter(places)
        for request in requests:
            for index, _, info in request.records:
                place = next(following)
                request.ids[index] = info.id if info is not None and info.id is not None else position_id(place)
        return end

    async def _sync_segments(self, at: int) -> None:
        touched = [self._log.descriptor(segment) for segment in sorted(self._log.unsynced)]
        self._log.unsynced.clear()
        if not self._topic.durable:
            return
        try:
            await self._topic.sync(touched)
        except OSError as error:
            self._state.move(0, self._log.abandon(at))
            raise publish_error(error) from error


def _make_info(draft: Draft, now: float) -> RecordInfo | None:
    due = now + draft.delay if draft.due_at is None else draft.due_at
    due = due if due > now else 0.0
    if draft.id is None and not due and not draft.tries and draft.enqueued_at is None:
        return None
    enqueued_at = now if draft.enqueued_at is None else draft.enqueued_at
    return RecordInfo(crc=crc32(draft.body), id=draft.id, due=due, tries=draft.tries, enqueued_at=enqueued_at)


def _refuse(requests: list[_PublishRequest], error: BackendError) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_exception(error)
    requests.clear()
