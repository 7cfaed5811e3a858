"""The dashboard: pages about the queues of one store, as an ASGI application.

`qworker ui URL` and `qworker serve URL --ui` serve it, and `dashboard(tasks)` is for applications that mount it. Its
numbers come from a sampler, and lists are read with a budget, so that no request counts or scans a queue.
"""

from __future__ import annotations

from contextlib import suppress

import structlog

from qworker.app import Tasks
from qworker.backend import Backend
from qworker.backend.registry import backend_class
from qworker.errors import QworkerError
from qworker.ui.access import Access, Login, Role, Secrets
from qworker.ui.app import Authorize, Dashboard
from qworker.ui.watch import Watch
from qworker.url import BackendURL

__all__ = ["Access", "Authorize", "Dashboard", "Role", "dashboard"]


def dashboard(tasks: Tasks, *, authorize: Authorize | None = None, read_only: bool = False) -> Dashboard:
    """Return the dashboard of an app's store, to be mounted in an ASGI application.

    It needs no lifespan: it samples the store from the first request to a minute after the last one.

    Args:
        tasks: The app.
        authorize: Returns what the user of a request may do, or None: then the response has status 404. It may be
            asynchronous. Without it, the dashboard has a login: with QWORKER_UI_TOKEN, with QWORKER_UI_VIEW_TOKEN,
            or by a link that the login page writes to the log.
        read_only: Whether nothing can be changed, whatever the user's role.

    Raises:
        UsageError: A token in the environment is not valid.
    """
    # Imported now, because the first page would hold up the loop of the application. A page shows the error.
    with suppress(QworkerError):
        backend_class(BackendURL.parse(tasks.url).scheme)

    async def opened() -> Backend:
        return await tasks.backend()

    def log_link(link: str) -> None:
        structlog.get_logger("qworker.ui").warning("ui_login_link", link=link)

    return Dashboard(
        Watch(opened, lambda: tasks.url, tasks.clock),
        login=Login(Secrets.from_environment()) if authorize is None else None,
        authorize=authorize,
        on_link=None if authorize is not None else log_link,
        tasks=tasks,
        read_only=read_only,
    )
