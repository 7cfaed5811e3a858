"""The result of one check of `qworker doctor`."""

from __future__ import annotations

from enum import StrEnum

import msgspec

__all__ = ["Check", "CheckStatus"]


class CheckStatus(StrEnum):
    """The status of a check."""

    OK = "ok"
    # It works, but worse than it could.
    WARN = "warn"
    # It does not work.
    BROKEN = "broken"


class Check(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    name: str
    health: CheckStatus
    # The finding.
    detail: str
    # The action to take; empty if there is nothing to do.
    fix: str = ""
