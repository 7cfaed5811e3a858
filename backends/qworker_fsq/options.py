"""The options of an `fsq:` URL, which override the `FSQ_*` variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from qworker.errors import InvalidName, InvalidURL
from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.directory.retention import describe_retention
from qworker.kit.file_system import shared_option
from qworker.kit.max_body import MAX_BODY, max_body
from qworker.kit.retention import KEEP_ALL, KEEP_OPTIONS, RetentionPolicy, keep_done, keep_failed
from qworker.names import check_queue
from qworker.url import BackendURL
from qworker_fsq.environment import Constants, ItemLimits

__all__ = ["FsqOptions", "check_host", "parse_root"]


class FsqOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL."""

    constants: Constants
    # The host whose sub-queues are used; None: the queues themselves.
    host: str | None = None
    # Whether publishes and settlements survive a power failure when they return.
    sync: bool = True
    keep_done: RetentionPolicy = KEEP_ALL
    keep_failed: RetentionPolicy = KEEP_ALL
    # The largest body in bytes. None: any size.
    max_body: int | None = None
    # Whether other hosts use the directory; None: as the type of its file system says.
    shared: bool | None = None

    @classmethod
    def from_url(cls, url: BackendURL) -> FsqOptions:
        """Read a URL's options.

        Raises:
            InvalidURL: An option is unknown or not valid.
            UsageError: An FSQ_* variable is not valid.
        """
        url.only({"host", "sync", "max_tries", "ttl", "shared", MAX_BODY, *KEEP_OPTIONS, *HISTORY_OPTIONS})
        constants = Constants.from_environment()
        if "max_tries" in url.options:
            constants = msgspec.structs.replace(constants, max_tries=url.integer("max_tries", 0))
        if "ttl" in url.options:
            constants = msgspec.structs.replace(constants, ttl=url.duration("ttl", 0.0))
        host = url.options.get("host")
        return cls(
            constants=constants,
            host=None if host is None else check_host(host),
            sync=url.choice("sync", "full", ("full", "off")) == "full",
            keep_done=keep_done(url, KEEP_ALL),
            keep_failed=keep_failed(url),
            max_body=max_body(url),
            shared=shared_option(url),
        )

    @property
    def retention(self) -> Mapping[str, str]:
        """How long finished messages are kept, as `QueueStats.retention` shows it."""
        return describe_retention(self.keep_done, self.keep_failed)

    @property
    def limits(self) -> ItemLimits:
        """The limits after which an item has failed.

        Without a limit in the environment or the URL, its task's own limit counts.
        """
        constants = self.constants
        return ItemLimits(max_tries=constants.max_tries or 0, ttl=constants.ttl, keep_done=self.keep_done.keep)


def parse_root(url: BackendURL, constants: Constants) -> Path:
    """Return the directory of queues: that of the URL, or FSQ_ROOT if it names none (`fsq:`).

    Raises:
        InvalidURL: It names a host.
    """
    if not url.authority and not url.path:
        return Path(constants.root)
    return url.directory


def check_host(host: str) -> str:
    """Return `host` if it can be the name of a host.

    Raises:
        InvalidURL: It cannot.
    """
    try:
        return check_queue(host)
    except InvalidName as error:
        raise InvalidURL(str(error).replace("valid queue name", "valid host name")) from error
