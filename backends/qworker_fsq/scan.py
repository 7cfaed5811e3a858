"""`qworker scan` on `fsq:`: it works like fsq's scan, item by item, in place."""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from qworker.backend.scan_source import ExitCodes, ProgramOutcome, QueuePaused, ScanError, ScanOptions
from qworker.kit.directory.blocked import is_about_one_file
from qworker.kit.directory.reasons import read_reason
from qworker.kit.files import check_writable
from qworker.kit.opening import open_directory
from qworker.kit.store_errors import store_error, store_errors
from qworker.url import BackendURL
from qworker_fsq.environment import Constants, ItemLimits
from qworker_fsq.item_file import reason_name
from qworker_fsq.layout import QueueDir, open_queue
from qworker_fsq.lease import LEAST_LINGER, LINGER, ClaimedItem, SkipReason, claim
from qworker_fsq.options import FsqOptions, check_host, parse_root

__all__ = ["FsqSource", "open_scan"]


def open_scan(url: BackendURL, queue: str, options: ScanOptions) -> FsqSource:
    """Open the source of a queue's items.

    Raises:
        InvalidURL: An option of the URL is not known.
        UsageError: An FSQ_* variable is not valid.
        ScanError: The queue does not exist.
        PermissionDenied: This user has no permission to work on it.
    """
    given = FsqOptions.from_url(url)
    constants = given.constants
    for name in ("ttl", "max_tries", "success", "fail_tmp", "fail_perm", "lock"):
        value: float | None = getattr(options, name)
        if value is not None:
            constants = msgspec.structs.replace(constants, **{name: value})
    hosts = options.hosts or ((given.host,) if given.host is not None else ())
    return FsqSource(str(parse_root(url, constants)), queue, constants, options, hosts)


class FsqSource:
    """The items of a queue, or of its hosts' sub-queues, sorted by their names at the beginning.

    Args:
        directory: The root.
        queue: The queue's name, checked.
        constants: The standard's constants.
        options: The options of the scan.
        hosts: The hosts of the sub-queues. Empty: the queue's own items, unless the options say all hosts.

    Raises:
        ScanError: The queue does not exist.
        PermissionDenied: This user has no permission to work on it.
    """

    def __init__(
        self, directory: str, queue: str, constants: Constants, options: ScanOptions, hosts: Sequence[str]
    ) -> None:
        self._queue = queue
        self.constants = constants
        self._limits = ItemLimits(max_tries=constants.scan_max_tries, ttl=constants.ttl)
        self._ignore_down = options.ignore_down
        self._changes_items = options.done
        self._queues: list[QueueDir] = []
        self._lingering: deque[tuple[float, ClaimedItem]] = deque()
        try:
            root = open_directory(directory)
        except OSError as error:
            raise ScanError(f"unknown queue: {queue}: {directory}: {error.strerror}") from error
        try:
            if options.all_hosts:
                hosts = self._all_hosts(root)
            for host in hosts if hosts or options.all_hosts else (None,):
                self._queues.append(self._open_queue(root, host))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(root)

    def _all_hosts(self, root: int) -> list[str]:
        base = self._open_queue(root, None)
        try:
            with store_errors(f"list the hosts of {self._queue}"):
                return base.host_names()
        finally:
            base.close()

    def _open_queue(self, root: int, host: str | None) -> QueueDir:
        of_host = "" if host is None else f" of host {host}"
        with store_errors(f"scan {self._queue}{of_host}"):
            opened = open_queue(root, self._queue, self.constants, None if host is None else check_host(host))
            if opened is None:
                raise ScanError(f"unknown queue: {self._queue}{of_host}")
            try:
                self._check_permission(opened)
            except OSError:
                opened.close()
                raise
        return opened

    def _check_permission(self, files: QueueDir) -> None:
        """Check that the outcome of an item can be stored, before a program runs whose outcome cannot."""
        if self._changes_items:
            for directory in (files.queue, files.done, files.fail):
                check_writable(directory)

    @property
    def exits(self) -> ExitCodes:
        """The values of FSQ_SUCCESS, FSQ_FAIL_TMP and FSQ_FAIL_PERM."""
        return ExitCodes(self.constants.success, self.constants.fail_tmp, self.constants.fail_perm)

    def work(self, say: Callable[[str], None]) -> Iterator[FsqWork]:
        """Yield each present item that can be locked and may still be tried."""
        with store_errors(f"list {self._queue}"):
            names = [(name, files) for files in self._queues for name in os.listdir(files.queue) if name[0] != "."]
        names.sort(key=lambda found: found[0])
        self._check_down()
        for name, files in names:
            if not self._is_allowed(files):
                continue
            claimed = self._claim(name, files, say)
            if claimed is not None:
                yield FsqWork(self, claimed)

    def _check_down(self) -> None:
        for files in self._queues:
            self._is_allowed(files)

    def _is_allowed(self, files: QueueDir) -> bool:
        """Return whether items may be taken now. If one host is paused, those of another host may."""
        if self._ignore_down or not files.is_down:
            return True
        if len(self._queues) == 1 or files.is_down_with_queue:
            raise QueuePaused(f"{self._queue} is paused")
        return False

    def _claim(self, name: str, files: QueueDir, say: Callable[[str], None]) -> ClaimedItem | None:
        try:
            claimed = claim(files, name, self._limits, now=time.time(), lock=self.constants.lock)
        except OSError as error:
            say(f"{name}: {error.strerror}")
            return None
        if isinstance(claimed, ClaimedItem):
            return claimed
        if claimed is SkipReason.FAILED:
            say(f"{read_reason(files.fail, reason_name(name)) or 'failed'} for item {name}; failed permanently")
        elif claimed is SkipReason.REFUSED:
            say(f"{name}: Permission denied")
        return None

    def why_exhausted(self, claimed: ClaimedItem) -> str | None:
        """Return why one more failure of an item is its last, or None if it is not."""
        item = claimed.item
        return self._limits.why_exhausted(item.tries + 1, item.enqueued_at, time.time())

    def close_later(self, claimed: ClaimedItem) -> None:
        """Keep a finished item locked for a moment."""
        now = time.monotonic()
        self._lingering.append((now, claimed))
        while self._lingering and self._lingering[0][0] < now - LINGER:
            self._lingering.popleft()[1].close()

    def close(self) -> None:
        """Close everything, when the last item has been finished for a moment."""
        if self._lingering:
            time.sleep(max(0.0, self._lingering[-1][0] + LEAST_LINGER - time.monotonic()))
        while self._lingering:
            self._lingering.popleft()[1].close()
        for files in self._queues:
            files.close()


class FsqWork:
    """One locked item, as a `ScanItem`.

    Args:
        source: Its source.
        claimed: The item.
    """

    def __init__(self, source: FsqSource, claimed: ClaimedItem) -> None:
        self._source = source
        self.claimed = claimed

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.claimed.name

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments in the name."""
        return self.claimed.item.arguments

    def environment(self) -> Mapping[str, str]:
        """Return the variables `FSQ_ITEM_*`."""
        item, files = self.claimed.item, self.claimed.files
        found = {
            "FSQ_ITEM_PID": item.pid,
            "FSQ_ITEM_ENTROPY": item.entropy,
            "FSQ_ITEM_HOSTNAME": item.hostname,
            "FSQ_ITEM_ID": self.claimed.name,
            "FSQ_ITEM_TRIES": str(item.tries),
            "FSQ_ITEM_ENQUEUED_AT": time.strftime(files.constants.timefmt, time.localtime(item.enqueued_at)),
        }
        return found if files.host is None else {**found, "FSQ_ITEM_HOST": files.host}

    def contents(self) -> int:
        """Return the descriptor of the locked file itself: a program that outlives this process keeps it locked."""
        return self.claimed.fd

    def end(self, how: ProgramOutcome, reason: str) -> str | None:
        """Rename the item.

        Raises:
            BackendError: The outcome cannot be stored, and the item stays in the queue.
        """
        why = self._source.why_exhausted(self.claimed) if how is ProgramOutcome.FAIL_TMP else None
        try:
            return self._end(how, reason, why)
        except OSError as error:
            files, name, is_kept = self.claimed.files, self.claimed.name, self._is_kept()
            self.claimed.close()
            if is_kept or not is_about_one_file(error, files.tmp, files.queue, files.done, files.fail):
                raise store_error(error, f"store the outcome of {name}") from error
            return f"{name}: it cannot be moved, so it stays in the queue: {error.strerror}"

    def _end(self, how: ProgramOutcome, reason: str, why: str | None) -> str | None:
        claimed, name = self.claimed, self.claimed.name
        if how is ProgramOutcome.SUCCESS:
            ended = claimed.finish(keep=True)
        elif how is ProgramOutcome.FAIL_TMP and why is None:
            ended = claimed.retry()
        else:
            ended = claimed.fail(reason if why is None else f"{why}\n{reason}")
        if how is ProgramOutcome.FAIL_TMP and why is None:
            claimed.close()
        else:
            self._source.close_later(claimed)
        if not ended:
            return f"{name}: another process has moved it, so it is not changed"
        return None if why is None else f"{why} for item {name}; failed permanently"

    def _is_kept(self) -> bool:
        """Return whether the directory keeps the items of other users, as this one: a sticky directory does."""
        is_sticky = bool(os.fstat(self.claimed.files.queue).st_mode & stat.S_ISVTX)
        return is_sticky and os.fstat(self.claimed.fd).st_uid != os.geteuid()

    def leave(self) -> None:
        """Close the file. A program that has it on standard input keeps the lock."""
        self.claimed.abandon()
