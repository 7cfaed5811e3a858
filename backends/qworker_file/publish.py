"""Publishing: write into tmp/, sync the data, rename the files to their visible names.

Then the directories are synced, and only then the call returns.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator, Sequence

import msgspec

from qworker.kit.directory.publish import sync_bodies, sync_names
from qworker.kit.files import find_inode, has_entry, try_unlink, write_all
from qworker.kit.group_commit import GroupCommit
from qworker.kit.opening import create_file
from qworker.message import Draft
from qworker_file.app_keys import open_app_keys
from qworker_file.id_reservation import reserve_ids
from qworker_file.layout import QueueDir
from qworker_file.names import index_name, place_name
from qworker_file.publish_plan import Plan
from qworker_file.store import Store

__all__ = ["publish"]

# Seconds on the loop before other tasks run.
_TURN = 0.002


class _Result(msgspec.Struct):
    """The result of a publish.

    Attributes:
        ids: The ids of its drafts.
        ready: The names in queue/, in order.
        delayed: The names in delay/, in order.
        instead: The ids of the messages that have the unique keys of drafts, by the ids of these.
        has_app_keys: Whether a message has taken a key that counts in all queues.
    """

    ids: list[str]
    ready: list[str]
    delayed: list[str]
    instead: dict[str, str]
    has_app_keys: bool = False


async def publish(store: Store, queue: str, drafts: Sequence[Draft]) -> list[str]:
    """Store messages and return their ids.

    Raises:
        NotSupported, InvalidName: A draft cannot be stored; none was.
        StorageFull, PublishUncertain, OSError: See `Backend.publish`.
    """
    # If it was deleted, the first step will show that.
    opened = store.get_open(queue) or store.get_or_create(queue)
    while True:
        result = _Result([], [], [], {})
        plans = store.planner.plan(drafts, result.ids)
        try:
            with opened.files:
                for batch in _batches(plans, store.files_at_once):
                    await _store_batch(store, opened.files, batch, result)
            break
        except FileNotFoundError:
            if opened.files.is_in_place(store.root):
                raise
            # The queue was deleted in the meantime, and is created again. The messages in the old one are lost with it.
            store.drop_deleted(queue)
            opened = store.get_or_create(queue)
    opened.added(result.ready, result.delayed)
    if result.ready or result.delayed:
        store.notify(opened)
    return [result.instead.get(each, each) for each in result.ids] if result.instead else result.ids


def _batches(plans: list[Plan], most: int) -> Iterator[list[Plan]]:
    """Divide messages so that one that replaces others is the only one of its batch with its unique key."""
    batch: list[Plan] = []
    keys: dict[str, bool] = {}
    for plan in plans:
        replaces = plan.replacing is not None
        is_met = plan.unique_key is not None and plan.unique_key in keys
        if len(batch) == most or (is_met and (replaces or keys[plan.unique_key or ""])):
            yield batch
            batch, keys = [], {}
        batch.append(plan)
        if plan.unique_key is not None:
            keys[plan.unique_key] = replaces
    if batch:
        yield batch


async def _store_batch(store: Store, files: QueueDir, plans: list[Plan], result: _Result) -> None:
    commit = store.group_commit
    try:
        await _write(files, plans, keep_open=commit is not None)
        are_synced = any(plan.replacing is not None for plan in plans)
        if are_synced:
            # A message that takes the place of another one is visible at once.
            store.check_exchange(files)
            await _sync(commit, plans)
        if any(plan.given_id is not None for plan in plans):
            plans = await _exclude_stored(store, files, plans, result)
        if not are_synced:
            await _sync(commit, plans)
    except BaseException:
        _discard(files, plans)
        raise
    try:
        await _show(files, plans, result)
    finally:
        _close(plans)
    if commit is not None and result.has_app_keys:
        await _sync_app_keys(commit, files)
    if commit is not None and plans:
        changed = {files.delay if plan.delayed else files.queue for plan in plans}
        if any(plan.given_id is not None for plan in plans):
            changed.add(files.names)
        await sync_names(commit, changed)


async def _sync(commit: GroupCommit | None, plans: list[Plan]) -> None:
    if commit is not None:
        await sync_bodies(commit, [plan.fd for plan in plans])


async def _sync_app_keys(commit: GroupCommit, files: QueueDir) -> None:
    fd = open_app_keys(files)
    try:
        await sync_names(commit, {fd})
    finally:
        os.close(fd)


async def _write(files: QueueDir, plans: list[Plan], *, keep_open: bool) -> None:
    turn_ends = time.perf_counter() + _TURN
    tmp, mode = files.tmp, files.item_mode
    for plan in plans:
        plan.fd = create_file(plan.temporary, tmp, mode)
        if plan.given_id is not None:
            # The lock distinguishes a publish that is in progress from one whose process died.
            fcntl.flock(plan.fd, fcntl.LOCK_EX)
        if plan.body:
            write_all(plan.fd, plan.body)
        if not keep_open and plan.given_id is None:
            fd, plan.fd = plan.fd, -2
            os.close(fd)
        if time.perf_counter() > turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.perf_counter() + _TURN


async def _exclude_stored(store: Store, files: QueueDir, plans: list[Plan], result: _Result) -> list[Plan]:
    """Reserve the given ids and unique keys. Discard and leave out the messages that are stored."""
    reserved = await reserve_ids(files, plans, store.planner, store.open_files, store.clock.time())
    result.has_app_keys = result.has_app_keys or reserved.has_app_keys
    if not reserved.stored and not reserved.instead:
        return plans
    result.instead |= reserved.instead
    for plan in reserved.replaced:
        (result.delayed if plan.delayed else result.ready).append(plan.name)
    _discard(files, [plan for plan in plans if reserved.has(plan.given_id)])
    if store.group_commit is not None:
        # Their publisher may not have made them durable yet, and this call reports that they are.
        await sync_names(store.group_commit, {files.queue, files.delay, files.names})
    return [plan for plan in plans if not reserved.has(plan.given_id)]


async def _show(files: QueueDir, plans: list[Plan], result: _Result) -> None:
    turn_ends = time.perf_counter() + _TURN
    tmp = files.tmp
    for number, plan in enumerate(plans):
        target, shown = (files.delay, result.delayed) if plan.delayed else (files.queue, result.ready)
        try:
            os.rename(plan.temporary, plan.name, src_dir_fd=tmp, dst_dir_fd=target)
        except OSError as error:
            # A rename that reported an error may have happened. The names are unique, so in that case the old name is
            # gone and the new name exists.
            if has_entry(plan.temporary, tmp) or not has_entry(plan.name, target):
                _discard(files, plans[number:])
                raise error from None
        shown.append(plan.name)
        # While it is locked, no worker leases it, and no call replaces it.
        _close([plan])
        if time.perf_counter() > turn_ends:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                _discard(files, plans[number + 1 :])
                raise
            turn_ends = time.perf_counter() + _TURN


def _discard(files: QueueDir, plans: list[Plan]) -> None:
    """Remove the files that are not visible yet."""
    for plan in plans:
        if plan.fd == -1:
            continue
        try:
            if plan.given_id is not None and plan.fd >= 0:
                _remove_index(files, plan.given_id, plan.fd)
            os.unlink(plan.temporary, dir_fd=files.tmp)
        except OSError:
            # It was renamed, the queue was deleted, or the reply was lost.
            if has_entry(plan.temporary, files.tmp):
                raise
    _close(plans)


def _remove_index(files: QueueDir, message_id: str, fd: int) -> None:
    """Remove the second link of a file that is not visible yet, and then discarded.

    It goes first: another publish of the id may take an index with only one link. No other publish replaces an index
    while its file is locked.
    """
    index = index_name(message_id)
    if find_inode(index, files.names) == os.fstat(fd).st_ino:
        try_unlink(place_name(message_id), files.names)
        os.unlink(index, dir_fd=files.names)


def _close(plans: list[Plan]) -> None:
    for plan in plans:
        if plan.fd >= 0:
            fd, plan.fd = plan.fd, -2
            os.close(fd)
