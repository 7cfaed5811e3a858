"""The first half of a bulk write: the messages of one attempt are written as files and synced."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Sequence

from qworker.backend.deviations import refuse_unsupported
from qworker.clock import Clock
from qworker.errors import NotSupported, PublishUncertain
from qworker.kit.files import write_all
from qworker.kit.linux import sync_file_system
from qworker.kit.opening import create_file, open_directory
from qworker.kit.store_errors import FINAL
from qworker.message import Draft
from qworker_file.deviations import DEVIATIONS
from qworker_file.names import item_name

__all__ = ["BackgroundSync", "write_partition"]

# Files of one directory: as many as fit into its first block, where the kernel finds and changes names quickly.
_CHUNK = 128
# A sync starts in the background after this many files.
_FLUSH = 10_000
# Suffixes of names that are cached.
_KINDS = 200


def write_partition(
    run: int, name: str, batches: Iterable[Sequence[Draft]], *, mode: int, clock: Clock, flusher: BackgroundSync | None
) -> tuple[int, int, int]:
    """Write an attempt's directory.

    Args:
        run: The open directory of the run.
        name: The name of the attempt's directory.
        batches: The messages to write.
        mode: The mode of the files.
        clock: The store's clock.
        flusher: Syncs the files in the background.

    Returns:
        The number of messages, the bytes of their bodies, and how many messages have a due time or a priority.
    """
    partition = _make(name, run)
    count = size = 0
    names = _Names(clock)
    chunk = -1
    try:
        for drafts in batches:
            for draft in drafts:
                if count % _CHUNK == 0:
                    _close(chunk)
                    chunk = -1
                    chunk = _make(f"{count:09d}", partition)
                fd = create_file(names.make_name(draft, count), chunk, mode)
                try:
                    if draft.body:
                        write_all(fd, draft.body)
                finally:
                    os.close(fd)
                count += 1
                size += len(draft.body)
                if flusher is not None and count % _FLUSH == 0:
                    flusher.start()
    finally:
        _close(chunk)
        os.close(partition)
    return count, size, names.out_of_order


def _make(name: str, parent: int) -> int:
    shared = stat.S_IMODE(os.fstat(parent).st_mode)
    os.mkdir(name, shared, dir_fd=parent)
    # The umask must not change the mode.
    os.chmod(name, shared, dir_fd=parent)
    return open_directory(name, parent)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


class _Names:
    """Names of staged files: `<row>.<due, ms>_<tries>[_<task>]`, with the delimiter of their priority.

    Attributes:
        out_of_order: How many of them have a due time or a priority, so workers do not take them in the order of rows.
    """

    def __init__(self, clock: Clock) -> None:
        self.out_of_order = 0
        self._clock = clock
        self._kinds: dict[tuple[str | None, int, int, tuple[str, ...]], str] = {}

    def make_name(self, draft: Draft, row: int) -> str:
        """Return the name of one draft.

        Raises:
            NotSupported: A directory cannot keep a field of the draft.
            UsageError: Its priority is not from 0 to 9.
        """
        if draft.unique_key is not None:
            raise NotSupported("file: does not support unique keys in bulk writes: enqueue these calls instead")
        if draft.priority or draft.fields:
            refuse_unsupported("file", DEVIATIONS, [draft])
        kind = (draft.task, draft.tries, draft.priority, draft.argv)
        suffix = self._kinds.get(kind)
        if suffix is None:
            suffix = _suffix(draft)
            if len(self._kinds) < _KINDS:
                self._kinds[kind] = suffix
        due = 0
        is_timed = draft.due_at is not None or draft.delay > 0
        if is_timed:
            due = _due_ms(draft, self._clock)
        if is_timed or draft.priority:
            self.out_of_order += 1
        return f"{row:09d}.{due}{suffix}"


def _suffix(draft: Draft) -> str:
    """Return the part of the item's name that follows the id."""
    words = draft.argv if draft.task is None else (draft.task, *draft.argv)
    return item_name("", draft.tries, words, draft.priority)[1:]


def _due_ms(draft: Draft, clock: Clock) -> int:
    due = clock.time() + draft.delay if draft.due_at is None else draft.due_at
    return max(0, int(due * 1000))


class BackgroundSync:
    """Syncs files in a thread while a task writes more, so that the task waits only briefly at its end.

    Args:
        fd: A descriptor on the file system, opened before the first file: the kernel reports each error once, to
            descriptors that were open when it occurred.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def start(self) -> None:
        """Start a sync, unless one is running."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="qworker-flush", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            sync_file_system(self._fd)
        except OSError as error:
            self._error = self._error or error

    def finish(self) -> None:
        """Sync the rest. It blocks.

        Raises:
            PublishUncertain, OSError: Something is not on the disk. It is not synced again: another attempt writes
                other files.
        """
        if self._thread is not None:
            self._thread.join()
        self._run()
        if self._error is not None:
            if self._error.errno in FINAL:
                raise self._error
            raise PublishUncertain(
                f"the disk could not store the staged messages: {self._error.strerror}"
            ) from self._error
