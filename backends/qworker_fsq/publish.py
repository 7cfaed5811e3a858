"""Enqueueing as in fsq(7): create the item in tmp/, write it to the disk, link it into queue/, and unlink it in tmp/.

A batch is written to the disk together, and its names are durable when the call returns. A link never replaces
anything: if a name is taken, the item gets another.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Mapping, Sequence

from qworker.kit.directory.publish import sync_bodies, sync_names
from qworker.kit.files import find_inode, link_file, list_names, try_unlink, write_all
from qworker.kit.opening import create_file
from qworker.message import Draft
from qworker_fsq.item_file import mark_due, write_original_id
from qworker_fsq.layout import QueueDir
from qworker_fsq.names import message_id
from qworker_fsq.publish_plan import Plan, hash_id
from qworker_fsq.store import Store

__all__ = ["publish"]

# Seconds on the loop before other tasks run.
_TURN = 0.002


async def publish(store: Store, queue: str, drafts: Sequence[Draft]) -> list[str]:
    """Store messages and return their ids.

    Raises:
        NotSupported: A draft cannot be stored; none was.
        StorageFull, PublishUncertain, OSError: See `Backend.publish`.
    """
    opened = store.get_or_create(queue)
    while True:
        now = store.clock.time()
        every = plans = [store.planner.plan(draft, now) for draft in drafts]
        try:
            with opened.files:
                if any(draft.original_id is not None for draft in drafts):
                    stored = await _names_stored(opened.files)
                    plans = [plan for plan in every if not _is_stored(plan, stored)]
                for start in range(0, len(plans), store.files_at_once):
                    await _store_batch(store, opened.files, plans[start : start + store.files_at_once])
            break
        except FileNotFoundError:
            if opened.files.is_in_place(store.root):
                raise
            # The queue was deleted in the meantime, and is created again. The messages in the old one are lost with it.
            store.drop_deleted(queue)
            opened = store.get_or_create(queue)
    names = [plan.name for plan in every]
    opened.added(names)
    store.notify(opened, trigger=True)
    return [message_id(name, store.options.constants) for name in names]


async def _store_batch(store: Store, files: QueueDir, plans: list[Plan]) -> None:
    commit = store.group_commit
    try:
        await _write(store, files, plans)
        if commit is not None:
            await sync_bodies(commit, [plan.fd for plan in plans])
        await _show(store, files, plans)
    finally:
        _close(files, plans)
    if commit is not None and plans:
        await sync_names(commit, {files.queue})


async def _write(store: Store, files: QueueDir, plans: list[Plan]) -> None:
    keep_open = store.group_commit is not None
    turn_ends = time.perf_counter() + _TURN
    for plan in plans:
        _write_one(store, files, plan)
        if not keep_open:
            fd, plan.fd = plan.fd, -1
            os.close(fd)
        if time.perf_counter() > turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.perf_counter() + _TURN


def _write_one(store: Store, files: QueueDir, plan: Plan) -> None:
    while True:
        try:
            plan.fd = create_file(plan.name, files.tmp, files.constants.item_mode)
            break
        except FileExistsError:
            store.planner.rename(plan)
    plan.temporary = plan.name
    if store.owner != (-1, -1):
        os.fchown(plan.fd, *store.owner)
    if plan.draft.body:
        write_all(plan.fd, plan.draft.body)
    if plan.draft.original_id is not None:
        write_original_id(plan.fd, plan.draft.original_id)
    if plan.due is not None:
        mark_due(plan.fd, plan.due)


async def _show(store: Store, files: QueueDir, plans: list[Plan]) -> None:
    turn_ends = time.perf_counter() + _TURN
    for plan in plans:
        while not _link(files, plan):
            store.planner.rename(plan)
        os.unlink(plan.temporary, dir_fd=files.tmp)
        plan.temporary = ""
        if time.perf_counter() > turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.perf_counter() + _TURN


def _link(files: QueueDir, plan: Plan) -> bool:
    """Make an item visible. Return False if another item has its name."""
    try:
        link_file(plan.temporary, plan.name, files.tmp, files.queue)
    except OSError as error:
        # If only the reply was lost, the link exists.
        inode = find_inode(plan.temporary, files.tmp)
        if inode is not None and inode == find_inode(plan.name, files.queue):
            return True
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def _close(files: QueueDir, plans: list[Plan]) -> None:
    """Close the files, and remove those that are not visible yet."""
    for plan in plans:
        if plan.fd >= 0:
            fd, plan.fd = plan.fd, -1
            os.close(fd)
        if plan.temporary:
            # The file is gone if the queue was deleted.
            try_unlink(plan.temporary, files.tmp)


async def _names_stored(files: QueueDir) -> dict[str, str]:
    """Return the names of all items in any state, by their pids. Only messages that are moved here need them."""
    found: dict[str, str] = {}
    for directory in (files.queue, files.done, files.fail):
        for name in await list_names(directory):
            fields = name[1:].split(name[0], 3)
            if len(fields) == 4:
                found[fields[2]] = name
    return found


def _is_stored(plan: Plan, stored: Mapping[str, str]) -> bool:
    """Return whether a message that is moved here is stored already. If so, its plan gets that name."""
    if plan.draft.original_id is None:
        return False
    name = stored.get(str(hash_id(plan.draft.original_id)))
    if name is None:
        return False
    plan.name = name
    return True
