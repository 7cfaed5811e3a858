"""The pages: what each of them shows, from the sampler and from reads with a budget. Each has a module."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qworker.ui.pages.activity import activity
from qworker.ui.pages.failures import failures, group
from qworker.ui.pages.find import find
from qworker.ui.pages.message import body, message
from qworker.ui.pages.overview import overview
from qworker.ui.pages.queue import queue
from qworker.ui.pages.schedules import schedules
from qworker.ui.pages.source import Source
from qworker.ui.pages.workers import workers

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


PAGES = (
    Page(path="/", content=overview, template="overview.html"),
    Page(path="/q/{queue}", content=queue, template="queue.html"),
    Page(path="/m/{queue}/{id}", content=message, template="message.html"),
    Page(path="/m/{queue}/{id}/body", content=body),
    Page(path="/find", content=find, template="find.html", is_live=False),
    Page(path="/failures", content=failures, template="failures.html"),
    Page(path="/failures/{queue}/{key}", content=group, template="group.html"),
    Page(path="/schedules", content=schedules, template="schedules.html"),
    Page(path="/workers", content=workers, template="workers.html"),
    Page(path="/activity", content=activity, template="activity.html", is_live=False),
)
