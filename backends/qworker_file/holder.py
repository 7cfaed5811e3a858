"""The names under which backend instances lease."""

from __future__ import annotations

import os
import re
import secrets
import socket

from qworker.names import new_id

__all__ = ["DETACHED", "Holder", "parse_publisher"]

# The prefix of a holder whose leases end by time alone.
DETACHED = "detached-"


class Holder:
    """The name under which one backend instance leases: at most 40 bytes, without dots."""

    __slots__ = ("detached_name", "name")

    def __init__(self, *, detached: bool) -> None:
        host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:10].strip("-") or "host"
        # The nonce of the process, which is also in the names of its unfinished files in tmp/, and the nonce of the
        # instance.
        nonce = new_id().rpartition("-")[2]
        own = secrets.token_hex(3)
        self.detached_name = f"{DETACHED}{nonce}-{own}"
        self.name = self.detached_name if detached else f"{host}-{os.getpid()}-{nonce}-{own}"


def parse_publisher(holder: str) -> str:
    """Return the nonce that the files in tmp/ of a holder's process have in their names."""
    return holder.rsplit("-", 2)[-2] if holder.count("-") >= 2 else ""
