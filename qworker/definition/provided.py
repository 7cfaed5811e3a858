"""The default of a parameter that the worker fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

__all__ = ["Provided", "Scope"]

Scope = Literal["attempt", "worker"]


class Provided(NamedTuple):
    """What `provide` returns: the provider of a parameter, and how long its value is kept."""

    function: Callable[..., Any]
    scope: Scope
