"""The options of a `sq:` URL."""

from __future__ import annotations

import re

import msgspec

from qworker.errors import InvalidURL
from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.max_body import MAX_BODY, max_body
from qworker.kit.segments.state import NAME_BYTES
from qworker.url import BackendURL

__all__ = ["SqOptions"]

_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SMALLEST_SEGMENT = 256
_LARGEST_SEGMENT = 1 << 30


class SqOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL.

    Attributes:
        channel: The name of our channel.
        temporary: Whether the channel begins at the write position, and leaves nothing behind.
        segment_size: Bytes of new segments. None: the size of the newest segment.
        durable: Whether a publish and a settlement are synced before they return.
        max_body: The largest body in bytes. None: any size.
    """

    channel: str
    temporary: bool
    segment_size: int | None
    durable: bool
    max_body: int | None

    @classmethod
    def from_url(cls, url: BackendURL) -> SqOptions:
        """Read the options of a URL.

        Raises:
            InvalidURL: An option is unknown or not valid.
        """
        url.only({"channel", "segment_size", "temporary", "sync", MAX_BODY, *HISTORY_OPTIONS})
        channel = url.options.get("channel", "default")
        if not _CHANNEL.fullmatch(channel) or len(channel) > NAME_BYTES:
            raise InvalidURL(
                f"{url.masked}: a channel must have 1 to {NAME_BYTES} of A-Z a-z 0-9 . _ - "
                "and start with a letter or digit"
            )
        size = url.integer("segment_size", 0, minimum=_SMALLEST_SEGMENT)
        if size > _LARGEST_SEGMENT:
            raise InvalidURL(f"{url.masked}: segment_size must be at most {_LARGEST_SEGMENT}")
        return cls(
            channel=channel,
            temporary=url.boolean("temporary", False),
            segment_size=size or None,
            durable=url.choice("sync", "full", ("full", "off")) == "full",
            max_body=max_body(url),
        )
