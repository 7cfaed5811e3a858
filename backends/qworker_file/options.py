"""What a `file:` URL can say."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from qworker.errors import InvalidURL
from qworker.history.store import HISTORY_OPTIONS, HistoryOptions
from qworker.url import BackendURL
from qworker_file.retention import Keep

__all__ = ["FileOptions"]

_MODES = ("0700", "0750", "0770", "02770")


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL."""

    # Publishes and settlements survive a power cut when they return.
    sync: bool = True
    keep_done: Keep = Keep("0", any=False)
    keep_fail: Keep = Keep("1")
    # Timestamps in names are in this host's local time, as fsq writes them.
    local_time: bool = False
    # Seconds between two listings that nothing asked for; None: as the means of being told suggest.
    rescan: float | None = None
    # Of directories that are made.
    mode: int = 0o700
    history: HistoryOptions = HistoryOptions()

    @classmethod
    def from_url(cls, url: BackendURL) -> FileOptions:
        """Read a URL's options.

        Raises:
            InvalidURL: one is unknown or makes no sense.
        """
        url.only({"sync", "keep_done", "keep_fail", "time", "rescan", "mode", *HISTORY_OPTIONS})
        keep_fail = Keep.parse("keep_fail", url.options.get("keep_fail", "1"))
        if not keep_fail.any:
            raise InvalidURL(f"{url.masked}: keep_fail=0 would lose failures unseen: give an age like 1h")
        return cls(
            sync=url.choice("sync", "full", ("full", "off")) == "full",
            keep_done=Keep.parse("keep_done", url.options.get("keep_done", "0")),
            keep_fail=keep_fail,
            local_time=url.choice("time", "utc", ("utc", "local")) == "local",
            rescan=url.duration("rescan", 0.0, least=1.0) if "rescan" in url.options else None,
            mode=int(url.choice("mode", "0700", _MODES), 8),
            history=HistoryOptions.from_url(url, default=True),
        )

    @property
    def words(self) -> str:
        """What differs from the defaults, as a URL's query."""
        given = [
            "" if self.sync else "sync=off",
            f"keep_done={self.keep_done.text}" if self.keep_done.any else "",
            f"keep_fail={self.keep_fail.text}" if self.keep_fail.limits else "",
            "time=local" if self.local_time else "",
            "" if self.history.enabled else "history=0",
        ]
        query = "&".join(option for option in given if option)
        return f"?{query}" if query else ""

    @property
    def retention(self) -> Mapping[str, str]:
        """How long what is finished is kept, in words."""
        return {
            "done": self.keep_done.words,
            "failed": self.keep_fail.words,
            "unfinished": "removed after 36 hours",
            "history": self.history.describe_retention(),
        }
