"""Asynchronous iterators for code without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Protocol, TypeVar

__all__ = ["iterate_sync"]

T = TypeVar("T")
R = TypeVar("R")

_END: Any = object()


class _App(Protocol):
    def _run_sync(self, coroutine: Coroutine[Any, Any, R], *, instead: str) -> R: ...


def iterate_sync(app: _App, values: AsyncGenerator[T], instead: str) -> Generator[T]:
    """Yield the values of an asynchronous generator, which runs on the background loop.

    Args:
        app: The app.
        values: The generator. It is closed at the end.
        instead: The code to use in a running event loop, for the error text.
    """
    run = app._run_sync  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    try:
        while (value := run(anext_or_end(values), instead=instead)) is not _END:
            yield value
    finally:
        run(values.aclose(), instead=instead)


async def anext_or_end(values: AsyncGenerator[T]) -> T:
    """Return the next value, or `_END`."""
    return await anext(values, _END)
