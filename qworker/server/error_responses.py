"""The responses for errors, for mq's endpoints and the additions."""

from __future__ import annotations

import structlog

from qworker.asgi.interface import BodyTooLarge, Disconnected
from qworker.errors import AlreadyEnqueued, MessageTooLarge, QueueNotFound, UsageError
from qworker.server.idempotency import IdempotencyKeyReused
from qworker.server.memory import ServerBusy

__all__ = ["to_error_response"]

log = structlog.get_logger()

_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_TOO_LARGE = b"the body is too large: send less, or raise --max-body-size, and max_body in the URL of the server"

# The first one that fits counts.
_STATUSES: dict[type[Exception], int] = {
    IdempotencyKeyReused: 422,
    MessageTooLarge: 413,
    UsageError: 400,
    QueueNotFound: 404,
    # Another message has the unique key, so a repetition changes nothing.
    AlreadyEnqueued: 409,
}


def to_error_response(error: Exception) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return the status, headers and body for an error.

    An error of the store is 503 with `Retry-After`. The message may or may not be stored, and the client tries again.
    """
    if isinstance(error, BodyTooLarge):
        # The connection is closed, because the rest of the body is not read.
        return 413, [(b"connection", b"close"), _TEXT], _TOO_LARGE
    if isinstance(error, Disconnected):
        return 400, [(b"connection", b"close")], b""
    headers = [
        _TEXT,
        # `mq+http:` raises the error with this name.
        (b"x-qworker-error", type(error).__name__.encode()),
    ]
    if isinstance(error, AlreadyEnqueued):
        headers.append((b"x-message-id", error.id.encode()))
    text = str(error).encode(errors="replace")
    if isinstance(error, ServerBusy):
        # The connection is closed, because the rest of the body may not be read.
        return 503, [*headers, (b"retry-after", b"2"), (b"connection", b"close")], text
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return status, headers, text
    log.warning("backend_error", error=str(error))
    # The text is not sent, because it can contain paths and addresses of the store.
    return 503, [*headers[1:], (b"retry-after", b"10")], b""
