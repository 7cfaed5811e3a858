"""Bulk publishing: each row is written as the file that it will be, in a directory under tmp/, and renamed into sight at the commit.

That rename is the only publication, so what is still under tmp/ is what has to be published still: a commit that dies goes on there,
whoever has leased and acked the first messages meanwhile. A partition is done when its directory can be removed, for listings may miss
files and `rmdir` does not.

    tmp/staged/<job>/run-<run>/<partition>.<attempt>/<row>.<due, ms>_<tries>[_<task>]
    -> queue/_<timestamp>_<entropy>_0_~<job>:<step>:<partition>:<row>_<tries>[_<task>]
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence

from qworker.clock import Clock
from qworker.errors import NotSupported, PublishFailed
from qworker.files import CREATE, DIRECTORY, list_names, store_errors, sync_file_system, write_all
from qworker.message import Draft
from qworker.staging import Manifest, Published, StagedPart, Staging
from qworker.staging.contract import message_id, missing, order_of
from qworker.staging.folder import JobFolder, remove_tree
from qworker_file.layout import QueueDir
from qworker_file.local import LocalQueue
from qworker_file.names import MAX_OWN, delay_name, item_name, size_of, stem_for
from qworker_file.store import Store

__all__ = ["FileStaging"]

# Files renamed between two turns of the loop, and between two wake-ups of workers.
_SLICE = 200
_WAKE = 5_000


class FileStaging(Staging):
    """See the module.

    Args:
        opened: gives the store, opened.
        queue: where the messages go; made if it is absent.
        job: the job's name.
    """

    def __init__(self, opened: Callable[[], Store], queue: str, job: str) -> None:
        super().__init__(queue, job)
        self._opened = opened

    async def done(self, step: int) -> Published | None:
        """Look for the mark in names/."""
        with store_errors(f"look for the job {self.job}"):
            return None if self._opened().queue(self.queue) is None else self._folder().done(step)

    async def sealed(self, step: int) -> Manifest | None:
        """Look for the seal under tmp/."""
        with store_errors(f"look for the job {self.job}"):
            return None if self._opened().queue(self.queue) is None else self._folder().sealed(step)

    # -- staging -----------------------------------------------------------------------------------------------------

    async def stage(self, run: str, part: int, attempt: str, batches: Iterable[Sequence[Draft]]) -> StagedPart:
        """Write one file per message; one `syncfs` for all of them."""
        with store_errors(f"stage messages for {self.queue!r}"):
            store = self._opened()
            files = store.made(self.queue).files
            directory = self._folder().make_run(run)
            try:
                name = f"{part}.{attempt}"
                try:
                    count, size = _write_part(files, directory, name, batches, store.clock)
                    if store.options.sync:
                        await _sync(store)
                except BaseException:
                    remove_tree(name, directory)
                    raise
            finally:
                os.close(directory)
        return StagedPart(run=run, part=part, attempt=attempt, count=count, size=size)

    async def discard(self, run: str) -> None:
        """Remove the run's directory."""
        with store_errors(f"discard a run of the job {self.job}"):
            self._folder().discard(run)

    # -- committing --------------------------------------------------------------------------------------------------

    async def seal(self, step: int, parts: Sequence[StagedPart]) -> Manifest | None:
        """Link the seal into its place under tmp/."""
        manifest = Manifest(step=step, sealed_at=self._opened().clock.time(), parts=order_of(parts))
        with store_errors(f"seal the job {self.job}"):
            folder = self._folder()
            if folder.sealed(step) is None and folder.done(step) is None:
                for part in manifest.parts:
                    directory = _open_part(folder, part)
                    if directory is not None:
                        os.close(directory)
                    elif part.count:
                        raise missing(self.job, part)
            return folder.seal(manifest)

    async def publish(self, manifest: Manifest) -> Published:
        """Rename what is staged into queue/ and delay/, sync both once, and leave the mark."""
        with store_errors(f"publish the job {self.job}"):
            store, folder = self._opened(), self._folder()
            local = store.made(self.queue)
            names = _Names(self.job, manifest, store)
            for number, part in enumerate(manifest.parts):
                directory = _open_part(folder, part)
                if directory is None:
                    # Published before.
                    continue
                try:
                    while True:
                        await _show_part(store, local, directory, names.of(number))
                        if _remove_part(folder, part):
                            break
                finally:
                    os.close(directory)
            try:
                await store.commit({local.files.queue, local.files.delay})
            except OSError as error:
                raise PublishFailed(f"the disk did not take the names of the job {self.job}: run it again") from error
            published = Published(
                job=self.job, step=manifest.step, rows=manifest.rows, rejected=manifest.rejected, at=store.clock.time()
            )
            # Only now: from here on nobody looks for what is left of this step.
            folder.mark(published)
            folder.clean(manifest)
        return published

    async def forget(self) -> None:
        """Remove the mark from names/."""
        with store_errors(f"forget the job {self.job}"):
            self._folder().forget()

    def _folder(self) -> JobFolder:
        store = self._opened()
        files = store.made(self.queue).files
        return JobFolder(files.tmp, files.names, self.job, mode=store.options.mode, durable=store.options.sync)


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_part(
    files: QueueDir, run: int, name: str, batches: Iterable[Sequence[Draft]], clock: Clock
) -> tuple[int, int]:
    """Write an attempt's directory; how many messages, and the bytes of their bodies."""
    shared = stat.S_IMODE(os.fstat(run).st_mode)
    os.mkdir(name, shared, dir_fd=run)
    # What was asked for, whatever the umask says.
    os.chmod(name, shared, dir_fd=run)
    directory = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=run)
    count = size = 0
    suffixes: dict[tuple[str | None, int, tuple[str, ...]], str] = {}
    mode = files.item_mode
    try:
        for drafts in batches:
            for draft in drafts:
                kind = (draft.task, draft.tries, draft.arguments)
                suffix = suffixes.get(kind)
                if suffix is None:
                    suffix = _suffix(draft)
                    if len(suffixes) < _SLICE:
                        suffixes[kind] = suffix
                if draft.priority or draft.key is not None or draft.fields:
                    _refuse(draft)
                fd = os.open(f"{count:09d}.{_due_ms(draft, clock)}{suffix}", CREATE, mode, dir_fd=directory)
                try:
                    if draft.body:
                        write_all(fd, draft.body)
                finally:
                    os.close(fd)
                count += 1
                size += len(draft.body)
    finally:
        os.close(directory)
    return count, size


def _suffix(draft: Draft) -> str:
    """What follows the id in the item's name."""
    words = draft.arguments if draft.task is None else (draft.task, *draft.arguments)
    return item_name("", draft.tries, words)[1:]


def _due_ms(draft: Draft, clock: Clock) -> int:
    if draft.due_at is not None:
        return max(0, int(draft.due_at * 1000))
    return int((clock.time() + draft.delay) * 1000) if draft.delay > 0 else 0


def _refuse(draft: Draft) -> None:
    if draft.priority:
        raise NotSupported("file: has no priorities: leave the column out, or use redis:")
    if draft.key is not None:
        raise NotSupported("file: has no keys: leave the column out, or use redis:")
    raise NotSupported("file: has no place for fields: put them into the body, or use rfq:")


async def _sync(store: Store) -> None:
    try:
        await asyncio.to_thread(sync_file_system, store.root)
    except OSError as error:
        # Never synced again: another attempt writes other files.
        raise PublishFailed(f"the disk did not take what was staged: {error.strerror}") from error


# -- renaming ----------------------------------------------------------------------------------------------------------


class _Names:
    """The names that staged files get: the same for everybody who publishes this seal."""

    def __init__(self, job: str, manifest: Manifest, store: Store) -> None:
        self._job = job
        self._manifest = manifest
        self._local = store.options.local_time
        self._now_ms = int(store.clock.time() * 1000)
        # The first nanosecond of each part: one after another, so that the order of the rows is that of the queue.
        self._starts: list[int] = []
        start = int(manifest.sealed_at * 1e9)
        for part in manifest.parts:
            self._starts.append(start)
            start += part.count

    def of(self, number: int) -> Callable[[str], tuple[bool, str]]:
        """For one part: from a staged name to whether it is due later, and its name."""
        start = self._starts[number]
        first = message_id(self._job, self._manifest.step, self._manifest.parts[number].part, 0)
        # The fields of a stem from the pid on, up to the row.
        given = stem_for(first, "0_0_0").split("_", 2)[2][:-1]
        stamps: dict[int, str] = {}

        def name(staged: str) -> tuple[bool, str]:
            head, _, rest = staged.partition("_")
            row, _, due = head.partition(".")
            second, ns = divmod(start + int(row), 1_000_000_000)
            stamp = stamps.get(second)
            if stamp is None:
                moment = time.localtime(second) if self._local else time.gmtime(second)
                stamp = stamps[second] = time.strftime("%Y%m%d%H%M%S", moment)
            stem = f"{stamp}_{ns:09d}_{given}{int(row)}"
            item = f"_{stem}_{rest}"
            if size_of(item) > MAX_OWN:
                # The task's name is a label only: the envelope has it whole.
                item = f"_{stem}_{rest.partition('_')[0]}"
            due_ms = int(due)
            return (True, delay_name(item, due_ms)) if due_ms > self._now_ms else (False, item)

        return name


async def _show_part(store: Store, local: LocalQueue, directory: int, name: Callable[[str], tuple[bool, str]]) -> None:
    """Rename what one look finds out of an attempt's directory."""
    files = local.files
    shown: tuple[list[str], list[str]] = ([], [])
    for number, entry in enumerate(sorted(await list_names(directory))):
        delayed, target = name(entry)
        try:
            os.rename(entry, target, src_dir_fd=directory, dst_dir_fd=files.delay if delayed else files.queue)
        except FileNotFoundError:
            # Another process that publishes this seal was faster.
            continue
        shown[delayed].append(target)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
            if len(shown[0]) >= _WAKE:
                _tell(store, local, shown)
    _tell(store, local, shown)


def _tell(store: Store, local: LocalQueue, shown: tuple[list[str], list[str]]) -> None:
    if shown[0] or shown[1]:
        local.added(*shown)
        store.notify(local)
        shown[0].clear()
        shown[1].clear()


def _open_part(folder: JobFolder, part: StagedPart) -> int | None:
    """An attempt's directory; None when it is gone: published, or never staged."""
    run = folder.open_run(part.run)
    if run is None:
        return None
    try:
        return os.open(f"{part.part}.{part.attempt}", DIRECTORY | os.O_NOFOLLOW, dir_fd=run)
    except FileNotFoundError:
        return None
    finally:
        os.close(run)


def _remove_part(folder: JobFolder, part: StagedPart) -> bool:
    """Remove an attempt's directory; False while something is in it: a listing may miss files when others rename there."""
    run = folder.open_run(part.run)
    if run is None:
        return True
    try:
        os.rmdir(f"{part.part}.{part.attempt}", dir_fd=run)
    except FileNotFoundError:
        # Another process published the rest.
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    finally:
        os.close(run)
    return True
