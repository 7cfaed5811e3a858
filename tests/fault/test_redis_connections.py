"""redis-py opens every connection to Redis: qworker opens no socket of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from redis import Redis

from tests.support.processes import environment
from tests.support.servers import RedisServer, free_port
from tests.support.topologies import cluster, command, watched
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.fault

ROOT = Path(__file__).parents[2]


@contextmanager
def served(kind: str) -> Iterator[tuple[str, Sequence[RedisServer]]]:
    """Start the servers of a kind of URL, and return the URL and all servers that its clients connect to."""
    with ExitStack() as stack:
        if kind == "sentinel":
            group = stack.enter_context(watched(replicas=1, sentinels=1))
            for sentinel in group.sentinels:
                # It would connect again if it had heard nothing for a moment, and that would be counted.
                command(sentinel, "SENTINEL", "SET", "main", "down-after-milliseconds", 600_000)
                command(sentinel, "SENTINEL", "DEBUG", "PUBLISH-PERIOD", 600_000)
            yield group.url(), [group.primary, *group.sentinels]
        elif kind == "cluster":
            formed = stack.enter_context(cluster())
            yield formed.url(), formed.nodes
        else:
            server = stack.enter_context(RedisServer(port=free_port()))
            urls = {"unix": server.url, "redis": server.tcp_url, "rfq": f"rfq://127.0.0.1:{server.port}/0"}
            yield urls[kind], [server]


def end_connections(client: Redis) -> None:
    """End the connections of the program. A sentinel would open its own again."""
    for each in client.client_list(_type="normal"):
        if not each["name"].startswith("sentinel-"):
            client.client_kill_filter(_id=each["id"], skipme=True)


@pytest.mark.parametrize(
    ("kind", "loop"),
    [
        ("unix", "asyncio"),
        ("redis", "uvloop"),
        ("rfq", "asyncio"),
        ("sentinel", "uvloop"),
        ("cluster", "asyncio"),
        ("cluster", "uvloop"),
    ],
)
def test_redis_py_opens_every_connection_that_the_servers_see(kind: str, loop: str) -> None:
    with served(kind) as (url, servers), ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for server in servers]

        def received() -> int:
            return sum(int(client.info("stats")["total_connections_received"]) for client in clients)

        before = received()
        program = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "tests.fault.counted_connections", url, loop],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert program.stdout is not None
        assert any(line == "used\n" for line in program.stdout)
        for client in clients:
            end_connections(client)
        output, _ = program.communicate("\n", PATIENCE)
        assert program.returncode == 0
        opened = int(output.split()[-1])
        assert opened > 1
        assert received() - before == opened
