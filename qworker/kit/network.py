"""Facts about hosts, and messages of connection errors for people."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from functools import lru_cache

__all__ = ["client_group", "error_text", "is_loopback"]

# asyncio joins the errors of all addresses of a host in one text.
_FIRST_ERRNO = re.compile(r"Multiple exceptions: \[Errno ([0-9]+)\]")


def error_text(error: BaseException) -> str:
    """Return the reason of an OSError as a short text."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        several = _FIRST_ERRNO.match(str(error))
        number = int(several[1]) if several is not None else error.errno
        if number is not None and number > 0:
            return os.strerror(number)
    return str(error) or type(error).__name__


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host's address."""
    if host == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A listener for both families sees its IPv4 connections as IPv6.
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


@lru_cache(maxsize=4096)
def client_group(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
