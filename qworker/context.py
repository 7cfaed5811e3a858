"""What a handler may know about its own run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from qworker.message import Message

__all__ = ["Context"]


class Context:
    """A handler whose first parameter is annotated `Context` gets one; a direct call gets one of its own making."""

    __slots__ = ("_log", "deadline", "headers", "message", "note", "state", "task", "token")

    def __init__(
        self,
        *,
        message: Message,
        task: str,
        token: int = 0,
        deadline: float | None = None,
        headers: Mapping[str, str] | None = None,
        state: Any = None,
    ) -> None:
        self.message = message
        self.task = task
        # The lease's fencing number, rising with each delivery: give it to stores that refuse a lower one.
        self.token = token
        # Unix seconds at which `timeout` cancels the handler; None without one.
        self.deadline = deadline
        self.headers: Mapping[str, str] = headers or {}
        # What the app's lifespan yielded.
        self.state = state
        # The last progress, for SIGUSR1 and `top`.
        self.note: str | None = None
        self._log: Any = None

    @property
    def tries(self) -> int:
        """Failed attempts before this one."""
        return self.message.tries

    @property
    def log(self) -> Any:
        """A structlog logger bound to the message's id, task, queue, tries and token."""
        if self._log is None:
            self._log = structlog.get_logger("qworker.handler").bind(
                message_id=self.message.id,
                task=self.task,
                queue=self.message.queue,
                tries=self.message.tries,
                token=self.token,
            )
        return self._log

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Say how far the handler has come: kept for those who look at the worker, and logged."""
        self.note = f"{done:g}/{total:g} {note}".strip() if total else f"{done:g} {note}".strip()
        self.log.debug("progress", done=done, total=total, note=note)
