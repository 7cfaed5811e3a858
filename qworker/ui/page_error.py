"""Why a page cannot be shown."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from qworker.errors import InvalidName, UsageError

__all__ = ["PageError", "status_of_error"]


class PageError(Exception):
    """A page that cannot be shown. Its text is one line for people.

    Attributes:
        status: The status of the response.
    """

    status: ClassVar[HTTPStatus]


def status_of_error(error: Exception) -> HTTPStatus:
    """Return the status of the response to a request that has failed. What the store refuses, it may allow later."""
    if isinstance(error, PageError):
        return error.status
    is_usage = isinstance(error, UsageError | InvalidName)
    return HTTPStatus.BAD_REQUEST if is_usage else HTTPStatus.SERVICE_UNAVAILABLE
