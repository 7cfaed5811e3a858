"""The deviations of `file:` from the contract."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["DEVIATIONS"]

DEVIATIONS: Mapping[str, str] = {
    "fields": "a file has a name and its contents",
    "retry_errors": "a file has a name and its contents: the history keeps the error",
}
