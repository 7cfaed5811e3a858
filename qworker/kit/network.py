"""Facts about hosts, and messages of connection errors for people."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl

__all__ = ["error_text", "is_loopback"]

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
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
