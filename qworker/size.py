"""Sizes as text: `4096`, `64KiB`, `64MiB`, `2GiB`, and short `64K`, `512M`, `4G`. All units are powers of 1024."""

from __future__ import annotations

import re

from qworker.errors import UsageError

__all__ = ["format_size", "parse_size"]

_TEXT = re.compile(r"([0-9]{1,12})(?:([KMGT])(?:iB)?)?")
_UNITS = {"T": 1 << 40, "G": 1 << 30, "M": 1 << 20, "K": 1 << 10}


def parse_size(text: str, *, least: int = 0) -> int:
    """Return the bytes of a size.

    Args:
        text: A whole number and a unit (`KiB`, `MiB`, `GiB`, `TiB`). Without a unit the number is in bytes.
        least: The smallest valid size in bytes.

    Raises:
        UsageError: It is not a size, or it is too small.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a valid size: use bytes (4096) or 64KiB, 64MiB, 2GiB")
    size = int(found[1]) * _UNITS.get(found[2], 1)
    if size < least:
        raise UsageError(f"{text!r} is too small: use at least {format_size(least)}")
    return size


def format_size(size: int) -> str:
    """Return a number of bytes as text in the largest unit without a fraction, for `parse_size`."""
    for unit, factor in _UNITS.items():
        if size and size % factor == 0:
            return f"{size // factor}{unit}iB"
    return str(size)
