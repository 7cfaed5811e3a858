"""Where the tasks of an app have gone that another app includes."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

__all__ = ["Inclusion"]

A = TypeVar("A")


class Inclusion(msgspec.Struct, Generic[A], frozen=True):
    """An app's place in another app.

    Attributes:
        app: The app that has its tasks now.
        prefix: What their names begin with there.
        queue: Their queue there. None: each keeps its own.
        example: The name of one of them there. None: there was none.
    """

    app: A
    prefix: str
    queue: str | None
    example: str | None
