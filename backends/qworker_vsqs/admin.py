"""Creating, deleting, counting and pausing queues; requeueing and deleting their messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from qworker.kit.directory.queue_files import list_queue_names
from qworker.kit.files import has_entry, hide_directory, make_empty, remove_whole_tree, try_unlink
from qworker.kit.planted import rename_file
from qworker.kit.store_errors import store_errors
from qworker.kit.threads import BlockingCall, run_in_thread
from qworker.message import FinishedMessage, QueueStats, Selection, State
from qworker.names import check_existing_queue
from qworker_vsqs.browse import ListedMessage, file_name, list_states
from qworker_vsqs.names import Unit, parse
from qworker_vsqs.queue_dir import MessageInfo, QueueDirectory
from qworker_vsqs.store import VsqsStore

__all__ = ["count_messages", "delete", "list_queues", "pause", "remove", "requeue", "resume"]


def list_queues(store: VsqsStore) -> list[str]:
    """Return the names of the directories that can be queues, sorted."""
    with store_errors(f"list {store.path}"):
        return list_queue_names(store.root, store.is_queue)


async def delete(store: VsqsStore, name: str) -> None:
    """Delete a directory with everything in it."""
    store.drop(check_existing_queue(name))
    with store_errors(f"delete the queue {name}"):
        if not store.is_queue(name):
            return
        hidden = hide_directory(name, store.root)
        if hidden is not None:
            await run_in_thread(BlockingCall.DELETE, remove_whole_tree, hidden, store.root)


async def count_messages(store: VsqsStore, name: str, retention: Mapping[str, str]) -> QueueStats:
    """Count the messages of a queue."""
    queue = store.require(name)
    with store_errors(f"count {name}"):
        listed = await list_states(store, queue)
        blocked = await queue.records.count(store.options.max_body, queue.directories)
    ready = listed[State.READY]
    oldest = min((info.enqueued_at or Unit.enqueued_at(number) for number, _, info in ready), default=None)
    return QueueStats(
        queue=name,
        ready=len(ready),
        leased=len(listed[State.LEASED]),
        delayed=len(listed[State.DELAYED]),
        failed=len(listed[State.FAILED]),
        oldest_age_s=None if oldest is None else max(0.0, store.clock.time() - oldest),
        paused=queue.is_paused(),
        blocked=blocked,
        retention=retention,
    )


async def pause(store: VsqsStore, name: str) -> None:
    """Pause a queue."""
    queue = store.require(name)
    with store_errors(f"pause {name}"):
        make_empty("down", queue.side)
        await store.sync(queue, [])


async def resume(store: VsqsStore, name: str) -> None:
    """Resume a queue."""
    queue = store.require(name)
    with store_errors(f"resume {name}"):
        try_unlink("down", queue.side)
        await store.sync(queue, [])
    store.wake_all()


async def requeue(store: VsqsStore, name: str, selection: Selection) -> int:
    """Make failed messages ready and return their number."""
    selection.require_failed()
    queue = store.require(name)
    with store_errors(f"requeue in {name}"):
        failed = await _select(store, queue, selection, State.FAILED)
        async with queue.locked():
            files = _requeue(queue, failed)
        count = len(files)
        if count:
            await store.sync(queue, files)
    store.wake_all()
    return count


async def remove(store: VsqsStore, name: str, selection: Selection) -> int:
    """Delete messages and return their number."""
    queue = store.require(name)
    with store_errors(f"remove from {name}"):
        count = _delete_messages(queue, await _select(store, queue, selection, *State))
        if count:
            await store.sync(queue, [])
        return count


async def _select(
    store: VsqsStore, queue: QueueDirectory, selection: Selection, *states: State
) -> Iterable[tuple[State, ListedMessage]]:
    """Return the selected messages. Those that are selected by ids are in some states only."""
    if selection.unchanged is not None:
        return _select_unchanged(queue, selection.unchanged)
    listed = await list_states(store, queue)
    if selection.state is not None:
        return [(selection.state, one) for one in listed[selection.state]]
    wanted = frozenset(selection.ids or ())
    return [(state, one) for state in states for one in listed[state] if str(one[0]) in wanted]


def _select_unchanged(
    queue: QueueDirectory, messages: Iterable[FinishedMessage]
) -> Iterator[tuple[State, ListedMessage]]:
    """Yield the failed messages that are unchanged. Each is checked when it is requested."""
    for one in messages:
        parsed = parse(one.id)
        if one.state is not State.FAILED or parsed is None or parsed[1] is not None:
            continue
        info = queue.read_info(parsed[0])
        if one.has_finished_at(info.failed_at):
            # Only in fail/: a message that was requeued since then is not there.
            yield State.FAILED, (parsed[0], None, info)


def _delete_messages(queue: QueueDirectory, messages: Iterable[tuple[State, ListedMessage]]) -> int:
    """Delete the messages that still have the names with which they were listed; return their number."""
    count = 0
    for state, listed in messages:
        if try_unlink(file_name(listed), queue.fail if state is State.FAILED else queue.fd):
            queue.delete_info(listed[0])
            count += 1
    return count


def _requeue(queue: QueueDirectory, failed: Iterable[tuple[State, ListedMessage]]) -> list[int]:
    """Make failed messages ready, under the queue's lock; return the descriptors of their infos, to be synced."""
    files: list[int] = []
    for _, (number, _, _) in failed:
        if not has_entry(str(number), queue.fail):
            # Another requeue was faster: the info is that of a live message.
            continue
        before = queue.read_info(number)
        files.append(queue.write_info(number, MessageInfo(enqueued_at=before.enqueued_at, origin=before.origin)))
        rename_file(str(number), str(number), queue.fail, queue.fd)
        queue.window.add(str(number))
    return files
