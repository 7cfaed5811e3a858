"""Processes that requeue many failed messages, to be killed: by a ticket of the dashboard, and by the command line."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import httpx

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.cli.main import main
from qworker.ui.access import Login, Secrets
from qworker.ui.app import Dashboard
from qworker.ui.watch import Watch

__all__ = ["QUEUE", "TASK", "asking", "by_command", "by_ticket"]

QUEUE, TASK = "mail", "send"
_SECRETS = Secrets(admin="the-token-of-all", signing="the-secret-of-all")


def by_command(url: str, _ticket: str, begun: Connection) -> None:
    """Requeue all failed calls of a task. Tell when it begins."""
    begun.send(None)
    main(["requeue", url, QUEUE, "--task", TASK, "--json"])


def by_ticket(url: str, ticket: str, begun: Connection) -> None:
    """Carry out a ticket to its end. Tell when it begins."""
    asyncio.run(_carry_out(url, ticket, begun))


async def _carry_out(url: str, ticket: str, begun: Connection) -> None:
    backend = open_backend(url)
    async with asking(backend) as client:
        begun.send(None)
        sent = {"ticket": ticket, "typed": QUEUE}
        found = (await client.post("/actions", json=sent)).raise_for_status().json()
        while found["state"] == "running":
            await asyncio.sleep(0.005)
            found = (await client.get(f"/actions/{found['id']}")).json()
        assert found["state"] == "done", found
    await backend.aclose()


def asking(backend: Backend) -> httpx.AsyncClient:
    """Return a client of a dashboard in this process. Its tickets are valid in all of these processes."""

    async def opened() -> Backend:
        return backend

    dashboard = Dashboard(Watch(opened), login=Login(_SECRETS))
    headers = {"authorization": f"Bearer {_SECRETS.admin}", "accept": "application/json"}
    transport = httpx.ASGITransport(app=dashboard)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, follow_redirects=True)
