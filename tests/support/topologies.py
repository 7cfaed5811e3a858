"""Several Redis servers that belong together: primaries with replicas and sentinels, and clusters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from redis.crc import key_slot

from tests.support.certificates import Certificates
from tests.support.servers import RedisServer, free_port
from tests.support.waiting import wait_for

__all__ = [
    "SLOTS",
    "Cluster",
    "Watched",
    "cluster",
    "command",
    "primary_server",
    "queue_slot",
    "replica_of",
    "sentinel_of",
    "watched",
]

SLOTS = 16384
# A primary begins to feed a new replica at once, and its replicas and other nodes hear of it every second.
_REPLICATION = {"repl_diskless_sync_delay": "0", "repl_ping_replica_period": "1"}
# Milliseconds after which a sentinel takes a server for down. Long enough for a busy machine.
_DOWN_AFTER = 700
# The milliseconds between what sentinels ask and tell. By default they are so far apart that a fail-over takes 10 s.
# Only a replica that has answered within the last five periods of pings is promoted, and during a fail-over a sentinel
# asks a replica once per second.
_SENTINEL_PERIODS = {"INFO-PERIOD": 300, "PING-PERIOD": 300, "ASK-PERIOD": 100, "PUBLISH-PERIOD": 100}


def queue_slot(queue: str) -> int:
    """Return the slot of a queue in a cluster, from the names of its keys in docs/redis.md."""
    return key_slot(b"{qworker:%b}:meta" % queue.encode())


# -- sentinels ---------------------------------------------------------------------------------------------------------


def primary_server(*, tls: Certificates | None = None) -> RedisServer:
    """Start a server that feeds a new replica at once."""
    return RedisServer(port=free_port(), tls=tls, **_REPLICATION)


def replica_of(primary: RedisServer, **options: Any) -> RedisServer:
    """Start a replica that has all data of its primary."""
    replica = RedisServer(port=free_port(), replicaof=f"127.0.0.1 {primary.port}", **_REPLICATION, **options)
    with replica.client() as client:
        wait_for(lambda: client.info("replication").get("master_link_status") == "up", "the replica is in step")
    return replica


def sentinel_of(
    primary: RedisServer, *, down_after: int = _DOWN_AFTER, quorum: int = 1, tls: Certificates | None = None
) -> RedisServer:
    """Start a sentinel that watches a server as `main`."""
    lines = [
        f"sentinel monitor main 127.0.0.1 {primary.port} {quorum}",
        f"sentinel down-after-milliseconds main {down_after}",
        "sentinel failover-timeout main 1500",
    ]
    sentinel = RedisServer(port=free_port(), sentinel="\n".join(lines), tls=tls)
    with sentinel.client() as client:
        for name, milliseconds in _SENTINEL_PERIODS.items():
            client.execute_command("SENTINEL", "DEBUG", name, milliseconds)
    return sentinel


class Watched:
    """A primary, its replicas, and the sentinels that know them all as `main`."""

    def __init__(self, primary: RedisServer, replicas: list[RedisServer], sentinels: list[RedisServer]) -> None:
        self.primary = primary
        self.replicas = replicas
        self.sentinels = sentinels

    def url(self, options: str = "") -> str:
        """Return the URL for a backend."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/main/0{options}"

    def named(self, sentinel: int = 0) -> int:
        """Return the port of the server that a sentinel names as the primary."""
        with self.sentinels[sentinel].client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
            return int(port)


@contextmanager
def watched(*, replicas: int, sentinels: int, tls: Certificates | None = None) -> Iterator[Watched]:
    """Run a primary, its replicas and sentinels of which most must agree, until the block ends."""
    with ExitStack() as stack:
        primary = stack.enter_context(primary_server(tls=tls))
        copies = [stack.enter_context(replica_of(primary, tls=tls)) for _ in range(replicas)]
        quorum = sentinels // 2 + 1
        watchers = [stack.enter_context(sentinel_of(primary, quorum=quorum, tls=tls)) for _ in range(sentinels)]
        for watcher in watchers:
            wait_for(lambda watcher=watcher: _knows(watcher, replicas, sentinels - 1), "a sentinel knows all others")
        yield Watched(primary, copies, watchers)


def _knows(sentinel: RedisServer, replicas: int, sentinels: int) -> bool:
    with sentinel.client() as client:
        known = client.sentinel_master("main")
        if (int(known["num-slaves"]), int(known["num-other-sentinels"])) != (replicas, sentinels):
            return False
        return all(replica["master-link-status"] == "ok" for replica in client.sentinel_slaves("main"))


# -- clusters ----------------------------------------------------------------------------------------------------------


class Cluster:
    """Primaries that share the slots evenly, in order. `replicas[n]` is the replica of `primaries[n]`."""

    def __init__(self, primaries: list[RedisServer], replicas: list[RedisServer]) -> None:
        self.primaries = primaries
        self.replicas = replicas

    @property
    def nodes(self) -> list[RedisServer]:
        """All servers."""
        return [*self.primaries, *self.replicas]

    def url(self, options: str = "") -> str:
        """Return the URL for a backend: it names two of the nodes."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.primaries[-2:])
        return f"redis+cluster://{hosts}{options}"

    def number_of(self, queue: str) -> int:
        """Return the number of the primary that has a queue as long as no slot has moved."""
        return next(n for n, end in enumerate(_bounds(len(self.primaries))[1:]) if queue_slot(queue) < end)

    def queues_of(self, number: int, count: int) -> list[str]:
        """Return names of queues, all on one primary."""
        names = (f"queue-{n}" for n in range(SLOTS))
        found = [name for _, name in zip(range(60), names, strict=False) if self.number_of(name) == number]
        return found[:count]


@contextmanager
def cluster(
    *, primaries: int = 3, replicas: int = 0, node_timeout: int = 5000, tls: Certificates | None = None
) -> Iterator[Cluster]:
    """Run a cluster whose nodes all know all others, until the block ends.

    Args:
        primaries: Number of primaries.
        replicas: Number of replicas of each primary: 0 or 1.
        node_timeout: Milliseconds after which the others take a node for down.
        tls: The nodes speak TLS only.
    """
    options = {"cluster_enabled": "yes", "cluster_node_timeout": str(node_timeout), **_REPLICATION}
    if tls is not None:
        options["tls_cluster"] = "yes"
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(RedisServer(port=free_port(), tls=tls, **options))
            for _ in range(primaries * (1 + replicas))
        ]
        formed = Cluster(nodes[:primaries], nodes[primaries:])
        bounds = _bounds(primaries)
        for node, first, end in zip(formed.primaries, bounds[:-1], bounds[1:], strict=True):
            command(node, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in nodes[1:]:
            command(node, "CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        wait_for(lambda: all(_sees(node, len(nodes), primaries) for node in nodes), "the cluster is formed")
        for primary, replica in zip(formed.primaries, formed.replicas, strict=bool(replicas)):
            command(replica, "CLUSTER", "REPLICATE", command(primary, "CLUSTER", "MYID"))
        wait_for(lambda: all(_in_step(replica) for replica in formed.replicas), "the replicas are in step")
        wait_for(lambda: all(_replicas_seen(node) == len(formed.replicas) for node in nodes), "all know the replicas")
        yield formed


def command(node: RedisServer, *arguments: Any) -> Any:
    """Return the answer of a node as it is."""
    with node.client() as client:
        return client.execute_command(*arguments)


def _bounds(primaries: int) -> list[int]:
    return [-(-SLOTS * n // primaries) for n in range(primaries + 1)]


def _sees(node: RedisServer, nodes: int, primaries: int) -> bool:
    state = command(node, "CLUSTER", "INFO")
    ranges = command(node, "CLUSTER", "SLOTS")
    return b"cluster_state:ok" in state and b"known_nodes:%d" % nodes in state and len(ranges) == primaries


def _in_step(replica: RedisServer) -> bool:
    with replica.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")


def _replicas_seen(node: RedisServer) -> int:
    # A range of slots, its primary, and its replicas.
    return sum(len(row) - 3 for row in command(node, "CLUSTER", "SLOTS"))
