"""Creating, deleting, counting and pausing queues; requeueing and deleting their messages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from qworker.errors import BackendError
from qworker.kit.directory.missing import queue_not_found
from qworker.kit.directory.queue_files import list_queue_names
from qworker.kit.files import hide_directory, remove_whole_tree
from qworker.kit.store_errors import store_errors
from qworker.message import Query, QueueStats, Selection, State
from qworker.names import check_existing_queue
from qworker_sq.browse import ahead_delayed, browse_ready, locate
from qworker_sq.channel import Channel
from qworker_sq.ledger import RowKind
from qworker_sq.store import SqStore

__all__ = ["count_messages", "delete", "delete_channel", "list_queues", "remove", "requeue", "set_paused"]


def list_queues(store: SqStore) -> list[str]:
    """Return the names of the topics, sorted."""
    with store_errors(f"list {store.path}"):
        return list_queue_names(store.root, store.is_queue)


async def delete(store: SqStore, queue: str) -> None:
    """Delete a topic with all of its channels."""
    store.drop(check_existing_queue(queue))
    with store_errors(f"delete the queue {queue}"):
        if not store.is_queue(queue):
            return
        hidden = hide_directory(queue, store.root)
        if hidden is not None:
            await asyncio.get_running_loop().run_in_executor(store.pool, remove_whole_tree, hidden, store.root)


async def delete_channel(store: SqStore, queue: str) -> None:
    """Delete our channel of a topic. Idempotent."""
    opened = await store.require(queue)
    store.topics.pop(queue, None)
    topic, name = opened.topic, store.options.channel
    index = topic.state.find(name.encode())
    with store_errors(f"delete the channel {name} of {queue}"):
        if opened.channel is not None:
            await opened.channel.finish()
        async with topic.locked():
            if index is not None and not store.options.temporary:
                topic.state.free(index)
                os.fsync(topic.state.fd)
                remove_whole_tree(f"{queue}/.qworker/channels/{name}", store.root)
        await topic.trim()
        await opened.finish()


async def count_messages(store: SqStore, queue: str, retention: Mapping[str, str]) -> QueueStats:
    """Count the messages of a queue."""
    async with store.channel_section(queue) as channel:
        pass
    with store_errors(f"use the queue {queue}"):
        ahead = await channel.count_ahead()
        async with channel.section():
            now = store.clock.time()
            ledger = channel.ledger
            ledger.make_due(now)
            waiting = len(ahead_delayed(channel, now))
            counts = {state: sum(1 for entry in ledger.open.values() if entry.state is state) for state in State}
            ready = counts[State.READY] + max(0, ahead - waiting - len(ledger.skipped))
            paused, failed = ledger.paused, len(ledger.failed)
        page = await anext(browse_ready(channel, Query(State.READY, limit=1), now), None) if ready else None
    return QueueStats(
        queue=queue,
        ready=ready,
        leased=counts[State.LEASED],
        delayed=counts[State.DELAYED] + waiting,
        failed=failed,
        oldest_age_s=None if page is None else max(0.0, now - page[0].message.enqueued_at),
        paused=paused,
        retention=retention,
    )


async def _commit(store: SqStore, channel: Channel, *, wake: bool = True) -> None:
    """Make the changes durable.

    Raises:
        QueueNotFound: The topic was deleted meanwhile.
    """
    try:
        await channel.commit(wake=wake)
    except BackendError as error:
        if channel.topic.is_alive():
            raise
        raise queue_not_found(channel.topic.name, store.directory) from error


async def set_paused(store: SqStore, queue: str, paused: bool) -> None:
    """Pause or resume our channel."""
    async with store.channel_section(queue) as channel:
        if channel.ledger.paused != paused:
            channel.append([[RowKind.PAUSE, paused]])
    await _commit(store, channel)


async def requeue(store: SqStore, queue: str, selection: Selection) -> int:
    """Make failed messages ready and return their number."""
    selection.require_failed()
    async with store.channel_section(queue) as channel:
        failed = channel.ledger.failed
        chosen = failed if selection.state is not None else _select(channel, selection)
        places = sorted(place for place in chosen if place in failed)
        if places:
            channel.append([[RowKind.REQUEUE, places]])
    if places:
        await _commit(store, channel)
    return len(places)


async def remove(store: SqStore, queue: str, selection: Selection) -> int:
    """Delete messages for our channel and return their number."""
    ahead = await _count_ready_ahead(store, queue) if selection.state is State.READY else 0
    async with store.channel_section(queue) as channel:
        if selection.state is None:
            count = _remove_places(channel, _select(channel, selection))
        else:
            now = store.clock.time()
            channel.ledger.make_due(now)
            count = _remove_state(channel, selection.state, now, ahead)
    if count:
        await _commit(store, channel, wake=False)
    return count


async def _count_ready_ahead(store: SqStore, queue: str) -> int:
    """Count the ready messages that were never handed out."""
    stats = await count_messages(store, queue, {})
    async with store.channel_section(queue) as channel:
        return stats.ready - len(list(channel.ledger.in_state(State.READY)))


def _select(channel: Channel, selection: Selection) -> list[int]:
    """Return the places of messages that are selected by their ids or must be unchanged."""
    places = [place for place in (locate(channel, one) for one in selection.ids or ()) if place is not None]
    failed = channel.ledger.failed
    for one in selection.unchanged or ():
        place = locate(channel, one.id) if one.state is State.FAILED else None
        if place is not None and place in failed and one.has_finished_at(failed[place].at):
            places.append(place)
    return list(dict.fromkeys(places))


def _remove_places(channel: Channel, places: list[int]) -> int:
    """Delete, for this channel, the messages at some places."""
    ledger = channel.ledger
    bodies = [place for place in places if place in ledger.failed or (place in ledger.open and ledger.open[place].kept)]
    if places:
        channel.append([[RowKind.REMOVE, places]])
        channel.drop_bodies(bodies)
    return len(places)


def _remove_state(channel: Channel, state: State, now: float, ahead: int) -> int:
    """Delete the messages in a state, for this channel. `ahead` is the number of ready ones ahead of the cursor."""
    ledger = channel.ledger
    if state is State.FAILED:
        return _remove_places(channel, list(ledger.failed))
    waiting = ahead_delayed(channel, now)
    if state is State.DELAYED:
        return _remove_places(channel, [*ledger.in_state(state), *waiting])
    count = _remove_places(channel, list(ledger.in_state(state)))
    if state is not State.READY:
        return count
    rows: list[list[Any]] = []
    if waiting:
        infos = channel.topic.infos.by_place
        rows.append([RowKind.ASIDE, 0, [[place, infos[place].due, infos[place].tries] for place in waiting]])
    channel.append([*rows, [RowKind.SKIP, channel.end()]])
    return count + ahead
