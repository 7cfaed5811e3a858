"""The options of `mq:` URLs."""

from __future__ import annotations

from typing import Self

import msgspec

from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.max_body import MAX_BODY, max_body
from qworker.url import BackendURL

__all__ = ["MqOptions"]


class MqOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL.

    Attributes:
        peers: Number of other processes that fetch from the same queues. See `Window`.
        sync: Whether publishes and settlements are synced.
        daemons: Whether this process does the work of mq's mover and reaper. If not, other processes move new messages
            to their queues, return messages that foreign programs fetched, and unlink removed ones.
        delay: Seconds after which a message returns that a foreign program fetched. A lease of this length that belongs
            to no process is equal to the fetch of an mq server. It needs no state: its token is the file's change time.
        max_body: The largest body in bytes. None: any size.
    """

    peers: int
    sync: bool
    daemons: bool
    delay: float
    max_body: int | None

    @classmethod
    def from_url(cls, url: BackendURL) -> Self:
        """Read the options of `mq:///root[?peers=N&sync=full|off&daemons=0&delay=DURATION&max_body=SIZE]`.

        Raises:
            InvalidURL: An option is not known, or its value is not valid.
        """
        url.only({"peers", "sync", "daemons", "delay", MAX_BODY, *HISTORY_OPTIONS})
        return cls(
            peers=url.integer("peers", 0),
            sync=url.choice("sync", "full", ("full", "off")) == "full",
            daemons=url.boolean("daemons", True),
            delay=url.duration("delay", 30.0),
            max_body=max_body(url),
        )
