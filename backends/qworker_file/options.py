"""The options of a `file:` URL."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from qworker.history.store import HISTORY_OPTIONS, HistoryOptions
from qworker.kit.directory.retention import describe_retention
from qworker.kit.file_system import shared_option
from qworker.kit.max_body import DEFAULT_MAX_BODY, MAX_BODY, max_body
from qworker.kit.retention import KEEP_ALL, KEEP_NONE, KEEP_OPTIONS, RetentionPolicy, keep_done, keep_failed
from qworker.url import BackendURL

__all__ = ["FileOptions"]

_MODES = ("0700", "0750", "0770", "02770")


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL."""

    # Whether publishes and settlements survive a power failure when they return.
    sync: bool = True
    keep_done: RetentionPolicy = KEEP_NONE
    keep_failed: RetentionPolicy = KEEP_ALL
    # Whether timestamps in names are in this host's local time, as fsq writes them.
    local_time: bool = False
    # Seconds between two listings if no change was reported; None: it depends on how changes are reported.
    poll_interval: float | None = None
    # Whether programs that see only queue/ and delay/ must see all messages: fsq, and older releases.
    fsq: bool = False
    # The mode of directories that are created.
    dir_mode: int = 0o700
    # The largest body in bytes. None: any size.
    max_body: int | None = DEFAULT_MAX_BODY
    # Whether other hosts use the directory; None: as the type of its file system says.
    shared: bool | None = None
    history: HistoryOptions = HistoryOptions()

    @classmethod
    def from_url(cls, url: BackendURL) -> FileOptions:
        """Read a URL's options.

        Raises:
            InvalidURL: One is unknown or not valid.
        """
        url.only(
            {"sync", "timezone", "poll_interval", "fsq", "dir_mode", "shared", MAX_BODY}
            | {*KEEP_OPTIONS, *HISTORY_OPTIONS}
        )
        return cls(
            sync=url.choice("sync", "full", ("full", "off")) == "full",
            keep_done=keep_done(url),
            keep_failed=keep_failed(url),
            local_time=url.choice("timezone", "utc", ("utc", "local")) == "local",
            poll_interval=url.duration("poll_interval", 0.0, least=1.0) if "poll_interval" in url.options else None,
            fsq=url.choice("fsq", "0", ("0", "1")) == "1",
            dir_mode=int(url.choice("dir_mode", "0700", _MODES), 8),
            max_body=max_body(url, DEFAULT_MAX_BODY),
            shared=shared_option(url),
            history=HistoryOptions.from_url(url, default=True),
        )

    @property
    def query(self) -> str:
        """The options that differ from the defaults, as a URL's query."""
        given = [
            "" if self.sync else "sync=off",
            f"keep_done={self.keep_done}" if self.keep_done.keep else "",
            f"keep_failed={self.keep_failed}" if self.keep_failed.limits else "",
            "timezone=local" if self.local_time else "",
            "fsq=1" if self.fsq else "",
            "" if self.shared is None else f"shared={self.shared:d}",
            "" if self.history.enabled else "history=0",
        ]
        query = "&".join(option for option in given if option)
        return f"?{query}" if query else ""

    @property
    def retention(self) -> Mapping[str, str]:
        """How long finished messages are kept, as `QueueStats.retention` shows it."""
        kept = describe_retention(self.keep_done, self.keep_failed)
        return {**kept, "history": self.history.describe_retention()}
