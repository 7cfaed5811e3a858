"""The pages: what each of them shows, from the sampler and from reads with a budget. Each has a module."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qworker.ui.pages import activity, failures, find, message, overview, queue, schedules, workers
from qworker.ui.pages.source import Source

__all__ = ["PAGES", "Page"]


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page.

    Attributes:
        path: Its path below that of the dashboard, as Starlette writes it.
        content: Returns what the template shows, by name, or a whole response.
        template: The file of the template. Empty: `content` returns responses only.
        is_live: Whether the script updates it.
    """

    path: str
    content: Callable[[Source, Request], Awaitable[dict[str, Any] | Response]]
    template: str = ""
    is_live: bool = True

    @property
    def is_of_queue(self) -> bool:
        """Whether it shows one queue, and nothing else."""
        return "{queue}" in self.path


PAGES = (
    Page(path="/", content=overview.overview, template="overview.html"),
    Page(path="/q/{queue}", content=queue.queue, template="queue.html"),
    Page(path="/m/{queue}/{id}", content=message.message, template="message.html"),
    Page(path="/m/{queue}/{id}/body", content=message.body),
    Page(path="/find", content=find.find, template="find.html", is_live=False),
    Page(path="/failures", content=failures.failures, template="failures.html"),
    Page(path="/failures/{queue}/{key}", content=failures.group, template="group.html"),
    Page(path="/schedules", content=schedules.schedules, template="schedules.html"),
    Page(path="/workers", content=workers.workers, template="workers.html"),
    Page(path="/activity", content=activity.activity, template="activity.html", is_live=False),
)
