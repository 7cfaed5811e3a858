"""Runs, seals and marks as files, for bulk writers in directories.

The calls block for microseconds, or longer where they say so.

    <parent>/staged/<load>/run-<run>/<partition>.<attempt>   the staged messages: a file or a directory
    <parent>/staged/<load>/seal-<step>                       the manifest of a step that is being published
    <marks>/job-<sha256 of the load's name>                  the load's last published step

A seal is created by `link`, which never overwrites, so the first one wins. It is removed only after the mark is on the
disk. A reader reads the seal first and the mark afterwards, so it ignores a seal that was made after the step was done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec

from qworker.bulk.contract import IncompleteLoad, LoadDone, Manifest
from qworker.errors import BackendError
from qworker.kit.files import (
    LONG_TEXT,
    has_entry,
    link_file,
    read_file,
    remove_empty,
    remove_tree,
    try_unlink,
    write_all,
)
from qworker.kit.opening import create_file, open_directory
from qworker.kit.store_errors import NOT_EMPTY

__all__ = ["GONE", "RUN", "SEAL", "STAGED", "LoadFiles", "incomplete_loads", "names_in", "read_seal"]

STAGED = "staged"
RUN, _SEAL, GONE = "run-", "seal-", "gone-"
# The manifest in the directory of a run that was handed over.
SEAL = "seal"
_ATTEMPTS = 20

T = TypeVar("T")

_read_manifest = msgspec.json.Decoder(Manifest).decode
_read_done = msgspec.json.Decoder(LoadDone).decode


class LoadFiles:
    """The files of one load.

    Args:
        parent: The open directory of `staged/`. Files are written there first.
        marks: The open directory of the marks, on the same file system.
        load: The load's name, which was checked.
        mode: The mode of new directories.
        durable: Whether seals and marks are synced.
    """

    def __init__(self, parent: int, marks: int, load: str, *, mode: int, durable: bool) -> None:
        self._parent = parent
        self._marks = marks
        self._path = f"{STAGED}/{load}"
        self._mark = f"job-{hashlib.sha256(load.encode()).hexdigest()}"
        self._mode = mode
        self._durable = durable

    # -- runs --------------------------------------------------------------------------------------------------------

    def make_run(self, run: str) -> int:
        """Open the directory of a run, and create it if it does not exist."""
        path = self._run(run)

        def make() -> int:
            self._make(STAGED, self._path, path)
            return open_directory(path, self._parent)

        return _repeated(make)

    def open_run(self, run: str) -> int | None:
        """Open the directory of a run. Return None if it does not exist."""
        try:
            return open_directory(self._run(run), self._parent)
        except FileNotFoundError:
            return None

    def discard(self, run: str) -> None:
        """Remove a run unless a seal names it. It takes as long as removing its files."""
        if any(run in manifest.runs for manifest in self._seals()):
            return
        self._remove_run(run)
        self.remove_empty()

    def hand_over(self, manifest: Manifest, run: str, target: int, name: str) -> None:
        """Move the directory of a sealed run, with its manifest, to another directory. It can be repeated.

        If a process dies before the rename, the seal is still here, and the next publish continues. After it, the run
        is gone from here, and nothing is left to do.

        Args:
            manifest: The seal.
            run: The run that the seal names.
            target: The open directory to which it is moved, on the same file system.
            name: Its name there, which no other run gets.

        Raises:
            OSError: It is unknown whether it was moved. Call it again.
        """
        folder = self.open_run(run)
        if folder is None:
            return
        try:
            self._keep_counting(manifest, folder)
            self._put_seal(manifest, folder)
        finally:
            os.close(folder)
        try:
            os.rename(self._run(run), name, src_dir_fd=self._parent, dst_dir_fd=target)
        except OSError as error:
            # Another process moved it, or the reply was lost. A late attempt can have created the run again.
            if error.errno not in NOT_EMPTY and has_entry(self._run(run), self._parent):
                raise
        if self._durable:
            os.fsync(target)
            self._sync(self._path)

    def _keep_counting(self, manifest: Manifest, folder: int) -> None:
        """Remove the attempts that do not count."""
        counting = {f"{each.partition}.{each.attempt}" for each in manifest.partitions}
        for entry in names_in(".", folder):
            if entry not in counting and entry != SEAL:
                remove_tree(entry, folder)

    def _put_seal(self, manifest: Manifest, folder: int) -> None:
        written = self._write(msgspec.json.encode(manifest))
        try:
            # Every process that publishes this seal writes the same.
            os.rename(written, SEAL, src_dir_fd=self._parent, dst_dir_fd=folder)
        except FileNotFoundError:
            # Another process moved the run, and workers have emptied and removed it.
            try_unlink(written, self._parent)
            return
        if self._durable:
            os.fsync(folder)

    def _run(self, run: str) -> str:
        return f"{self._path}/{RUN}{run}"

    def _remove_run(self, run: str) -> None:
        # It is renamed first, so that an attempt that still works there finds nothing instead of a half.
        gone = f"{self._path}/{GONE}{secrets.token_hex(8)}"
        try:
            os.rename(self._run(run), gone, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        except FileNotFoundError:
            # Another process removed it. Or the reply was lost, and it has its new name.
            pass
        remove_tree(gone, self._parent)

    def remove_empty(self) -> None:
        """Remove the folder of the load, and the folder of all loads, if they are empty."""
        for path in (self._path, STAGED):
            remove_empty(path, self._parent)

    # -- seals -------------------------------------------------------------------------------------------------------

    def sealed(self, step: int) -> Manifest | None:
        """Return the seal of a step, or None if the step is done."""
        manifest = self._seal(f"{_SEAL}{step}")
        # The seal is read first, then the mark: see the module.
        if manifest is not None and self.done(step) is not None:
            self.clean(manifest)
            return None
        return manifest

    def seal(self, manifest: Manifest) -> Manifest | None:
        """Seal a step. Return the seal that counts, or None if the step is done.

        Raises:
            OSError: It is unknown whether the step is sealed.
        """
        seal = f"{self._path}/{_SEAL}{manifest.step}"
        written = self._write(msgspec.json.encode(manifest))

        def link() -> None:
            # A load without rows has no folder yet.
            self._make(STAGED, self._path)
            link_file(written, seal, self._parent, self._parent)
            self._sync(self._path)

        try:
            _repeated(link)
        except FileExistsError:
            # Another run was faster. Or the reply was lost, and it is this run's seal.
            self._sync(self._path)
        finally:
            os.unlink(written, dir_fd=self._parent)
        return self.sealed(manifest.step)

    def unfinished(self) -> list[Manifest]:
        """Return the seals of the steps that are not done."""
        # The seal is read first, then the mark: see the module.
        return [manifest for manifest in self._seals() if self.done(manifest.step) is None]

    def clean(self, manifest: Manifest) -> None:
        """Remove what is left of a step that is done.

        It takes as long as removing the files of attempts that did not count.
        """
        for run in manifest.runs:
            self._remove_run(run)
        # Last: as long as the seal exists, the next reader cleans up.
        try_unlink(f"{self._path}/{_SEAL}{manifest.step}", self._parent)
        self.remove_empty()

    def _seals(self) -> list[Manifest]:
        found = [self._seal(name) for name in names_in(self._path, self._parent) if name.startswith(_SEAL)]
        return [manifest for manifest in found if manifest is not None]

    def _seal(self, name: str) -> Manifest | None:
        return read_seal(f"{self._path}/{name}", self._parent)

    # -- marks -------------------------------------------------------------------------------------------------------

    def done(self, step: int) -> LoadDone | None:
        """Return the mark if this step or a later one is done."""
        text = read_file(self._mark, self._marks)
        if text is None:
            return None
        try:
            published = _read_done(text)
        except ValueError as error:
            raise BackendError(f"the mark {self._mark} is damaged: {error}") from error
        return published if published.step >= step else None

    def mark(self, published: LoadDone) -> None:
        """Mark a step as done, unless a later one is."""
        written = self._write(msgspec.json.encode(published))
        lock = open_directory(".", self._parent)
        try:
            # No other process may replace the mark between the check and the rename: a step would be undone.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.done(published.step) is None:
                os.rename(written, self._mark, src_dir_fd=self._parent, dst_dir_fd=self._marks)
            else:
                os.unlink(written, dir_fd=self._parent)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)
        if self._durable:
            os.fsync(self._marks)

    def forget(self) -> None:
        """Remove the mark."""
        try_unlink(self._mark, self._marks)

    # -- files -------------------------------------------------------------------------------------------------------

    def _write(self, text: bytes) -> str:
        name = f"sealing-{secrets.token_hex(8)}"
        fd = create_file(name, self._parent, self._mode & 0o666)
        try:
            write_all(fd, text)
            if self._durable:
                os.fsync(fd)
        except BaseException:
            os.unlink(name, dir_fd=self._parent)
            raise
        finally:
            os.close(fd)
        return name

    def _make(self, *paths: str) -> None:
        for path in paths:
            try:
                os.mkdir(path, self._mode, dir_fd=self._parent)
            except FileExistsError:
                continue
            os.chmod(path, self._mode, dir_fd=self._parent)

    def _sync(self, path: str) -> None:
        if self._durable:
            try:
                fd = open_directory(path, self._parent)
            except FileNotFoundError:
                # The load is done: it has a mark.
                return
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def read_seal(path: str, parent: int) -> Manifest | None:
    """Return a seal, or None if it does not exist.

    Raises:
        OSError: It cannot be read.
        BackendError: It is damaged.
    """
    text = read_file(path, parent, LONG_TEXT)
    if text is None:
        return None
    try:
        return _read_manifest(text)
    except ValueError as error:
        raise BackendError(f"the seal {path} is damaged: {error}") from error


def incomplete_loads(parent: int, marks: int) -> list[IncompleteLoad]:
    """Return the loads of a directory that are sealed and not done, the oldest first.

    Raises:
        OSError: A file cannot be read.
        BackendError: A seal or a mark is damaged.
    """
    found = [
        IncompleteLoad(name=load, manifest=manifest)
        for load in names_in(STAGED, parent)
        for manifest in LoadFiles(parent, marks, load, mode=0o700, durable=False).unfinished()
    ]
    return sorted(found, key=lambda each: each.manifest.sealed_at)


def _repeated(step: Callable[[], T]) -> T:
    """Repeat a step while other processes remove its empty folder at the same time."""
    for _ in range(_ATTEMPTS):
        try:
            return step()
        except FileNotFoundError:
            continue
    return step()


def names_in(path: str, parent: int) -> list[str]:
    """Return the names in a directory, or nothing if it does not exist."""
    try:
        fd = open_directory(path, parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
