"""What one check of `qworker doctor` found."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["Check", "CheckStatus"]


class CheckStatus(StrEnum):
    """How a check came out."""

    OK = "ok"
    # It works, but worse than it could.
    WARN = "warn"
    # It does not work.
    BROKEN = "broken"


class Check(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    name: str
    health: CheckStatus
    # What was found.
    detail: str
    # What to do about it; empty where nothing is to be done.
    fix: str = ""
