"""The options of a `vsqs:` URL."""

from __future__ import annotations

import msgspec

from qworker.history.store import HISTORY_OPTIONS
from qworker.kit.max_body import MAX_BODY, max_body
from qworker.url import BackendURL
from qworker_vsqs.names import Unit

__all__ = ["VsqsOptions"]

_UNITS = {"us": Unit(1_000_000, 1000), "ms": Unit(1000, 16)}


class VsqsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a URL.

    Attributes:
        unit: The unit of ids and expiries.
        capacity: The largest number of messages in a queue, including leased ones. None: any number.
        publish_timeout: Seconds that a publish waits for room. None: no limit.
        durable: Whether a publish and a settlement are synced before they return.
        max_body: The largest body in bytes. None: any size.
    """

    unit: Unit
    capacity: int | None
    publish_timeout: float | None
    durable: bool
    max_body: int | None

    @classmethod
    def from_url(cls, url: BackendURL) -> VsqsOptions:
        """Read the options of a URL.

        Raises:
            InvalidURL: An option is unknown or not valid.
        """
        url.only({"time_unit", "max_messages", "publish_timeout", "sync", MAX_BODY, *HISTORY_OPTIONS})
        return cls(
            unit=_UNITS[url.choice("time_unit", "us", _UNITS)],
            capacity=url.integer("max_messages", 0, minimum=1) or None,
            publish_timeout=url.duration("publish_timeout", 0.0) if "publish_timeout" in url.options else None,
            durable=url.choice("sync", "full", ("full", "off")) == "full",
            max_body=max_body(url),
        )
