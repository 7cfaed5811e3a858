"""A dashboard in this process, and a store to look at."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.requests import Request

from qworker import Draft
from qworker.backend import Backend
from qworker.errors import BackendUnavailable
from qworker.history.batch import EventBatch
from qworker.message import SettleAction, Settlement
from qworker.ui.access import Access, Role
from qworker.ui.app import Dashboard, below
from qworker.ui.watch import Watch

CALL = b'{"task":"mail.send","args":["a@example.org"],"kwargs":{"api_key":"k-123"}}'
ERROR = "Traceback (most recent call last):\n  ...\nConnectionError: host 7 refused"
# Unix seconds of the oldest event.
BEGIN = 1_800_000_000.0


@asynccontextmanager
async def watched(
    backend: Backend | None, *, role: Role = "admin", root: str = "", **options: Any
) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a dashboard, as somebody who is logged in, unless there are other options. None: no store answers."""

    async def opened() -> Backend:
        if backend is None:
            raise BackendUnavailable("connection refused")
        return backend

    def known(_request: Request) -> Access:
        return Access("test", role)

    dashboard = Dashboard(Watch(opened), **(options or {"authorize": known}))
    transport = httpx.ASGITransport(below(dashboard, root))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://localhost{root}") as client:
        yield client
    await dashboard.aclose()


async def fill_store(backend: Backend) -> None:
    """Messages in each state, and the history of a worker, in two queues."""
    drafts = [Draft(body=CALL, id=f"m-{number}", task="mail.send") for number in range(5)]
    await backend.publish("mail", [*drafts, Draft(body=CALL, id="later", delay=3600)])
    await backend.publish("raw", [Draft(body=b"=1+1", id="plain"), Draft(body=b"\x00\xff", id="binary")])
    leases = await backend.lease("mail", 2, 3600)
    await backend.settle([Settlement(lease=leases[0], action=SettleAction.FAIL_PERM, error=ERROR)])
    backend.history.append(
        [
            EventBatch(
                kind="acked" if number % 2 else "retried",
                queue="mail",
                worker="web1-4242",
                at=BEGIN + number,
                id=[f"old-{number}"],
                task="mail.send",
                error=None if number % 2 else "host 7 refused",
            )
            for number in range(6)
        ]
    )
