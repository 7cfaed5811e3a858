"""Clients of other projects: each stores what it sends, also if it offers another version of HTTP."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import httpx
import pytest

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from tests.support.servers import RedisServer
from tests.support.serving import served
from tests.support.waiting import PATIENCE

JAVA_CLIENT = Path(__file__).parent.parent / "fixtures" / "java-client"
# The second one looks like a request.
BODIES = ["hello", "PUT /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n", "x" * 100_000]


async def run(*command: str) -> str:
    """The output of a program."""
    result = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return result.stdout


async def curl(url: str) -> list[int]:
    """The statuses of posts on one connection that offers HTTP/2."""
    parts = [
        ["--http2", "-s", "-o", "/dev/null", "-w", "%{http_code}\n", "--data-binary", body, url] for body in BODIES
    ]
    words = [word for part in parts for word in ("--next", *part)][1:]
    return [int(line) for line in (await run("curl", *words)).split()]


async def java(url: str) -> list[int]:
    """The statuses of posts of Java's client, which offers HTTP/2 in its first request."""
    return [int(line) for line in (await run("java", "-cp", str(JAVA_CLIENT), "Post", url, *BODIES)).split()]


async def through_httpx(url: str) -> list[int]:
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
        return [(await client.post(url, content=body.encode())).status_code for body in BODIES]


async def through_aiohttp(url: str) -> list[int]:
    statuses: list[int] = []
    async with aiohttp.ClientSession() as session:
        for body in BODIES:
            async with session.post(url, data=body.encode()) as response:
                statuses.append(response.status)
    return statuses


@pytest.fixture(params=["file", "redis"])
def backend(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "file":
        yield open_backend(f"file://{tmp_path}/root?sync=off", remote_leases=True)
        return
    with RedisServer() as redis:
        yield open_backend(redis.url, remote_leases=True)


@pytest.mark.parametrize("post", [curl, java, through_httpx, through_aiohttp], ids=lambda post: post.__name__)
async def test_a_client_stores_what_it_sends(backend: Backend, post: Callable[[str], Awaitable[list[int]]]) -> None:
    queue = f"clients-{secrets.token_hex(4)}"
    with served(backend) as server:
        assert await post(f"{server.url}/{queue}/messages") == [201] * len(BODIES)
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            stored = [(await client.get(f"{server.url}/{queue}/messages")).text for _ in BODIES]
            assert stored == BODIES
            assert (await client.get(f"{server.url}/-/queues")).json() == [queue]
