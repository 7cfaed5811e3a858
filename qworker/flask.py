"""A helper for Flask: handlers that run in the context of an application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from qworker.attempt.hooks import Attempt, Hook
from qworker.errors import UsageError

if TYPE_CHECKING:
    from flask import Flask
    from flask.ctx import AppContext as FlaskContext

__all__ = ["AppContext"]


class AppContext(Hook):
    """Runs each handler in the context of a Flask application, as a view: `current_app`, `g` and extensions work.

    It is for `async def` handlers and plain functions. A handler with `process=True` has no application in its process.

    Args:
        app: The application. None: an app factory sets the attribute.

    Attributes:
        app: The application.
    """

    kinds = frozenset({"async", "thread"})

    def __init__(self, app: Flask | None = None) -> None:
        self.app = app

    async def around(self, attempt: Attempt, go: Callable[[], Awaitable[object]]) -> object:
        """Run an `async def` handler in the context."""
        with self._context():
            return await go()

    def around_sync(self, attempt: Attempt) -> Iterator[None]:
        """Run a plain function in the context."""
        with self._context():
            yield

    def _context(self) -> FlaskContext:
        if self.app is None:
            raise UsageError(
                "flask: AppContext has no app: set its `app` in create_app(), and let the worker call that"
            )
        return self.app.app_context()
