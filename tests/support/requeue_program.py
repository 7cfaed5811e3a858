"""Processes that requeue many failed messages, to be killed: by a ticket of the dashboard, and by the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.ui.access import Login, Secrets
from qworker.ui.app import Dashboard
from qworker.ui.watch import Watch
from tests.support.waiting import let_pass

__all__ = ["QUEUE", "TASK", "asking", "by_command", "by_ticket"]

QUEUE, TASK = "mail", "send"
_SECRETS = Secrets(admin="the-token-of-all", signing="the-secret-of-all")


def by_command(url: str, _ticket: str) -> None:
    """Requeue all failed calls of a task."""
    main(["requeue", url, QUEUE, "--task", TASK, "--json"])


def by_ticket(url: str, ticket: str) -> None:
    """Carry out a ticket to its end."""
    asyncio.run(_carry_out(url, ticket))


async def _carry_out(url: str, ticket: str) -> None:
    backend = open_backend(url)
    async with asking(backend) as client:
        sent = {"ticket": ticket, "typed": QUEUE}
        found = (await client.post("/actions", json=sent)).raise_for_status().json()
        while found["state"] == "running":
            await let_pass(0.005)
            found = (await client.get(f"/actions/{found['id']}")).json()
        assert found["state"] == "done", found
    await backend.aclose()


@asynccontextmanager
async def asking(backend: Backend) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of a dashboard in this process. Its tickets are valid in all of these processes."""

    async def opened() -> Backend:
        return backend

    dashboard = Dashboard(Watch(opened), login=Login(_SECRETS))
    headers = {"authorization": f"Bearer {_SECRETS.admin}", "accept": "application/json"}
    transport = httpx.ASGITransport(app=dashboard)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, follow_redirects=True)
    try:
        async with client:
            yield client
    finally:
        await dashboard.aclose()
