"""Find the server of a queue: the one of the URL, the primary that the sentinels know, or the node of a cluster."""

from __future__ import annotations

import abc
from functools import lru_cache
from typing import Any, cast

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError

from qworker.errors import BackendUnavailable
from qworker_redis.connection import connection_settings, connection_type, reason_of
from qworker_redis.error_replies import Redirected
from qworker_redis.options import Address, Options, TcpAddress

__all__ = ["Topology", "make_topology", "queue_slot"]


@lru_cache(4096)
def queue_slot(queue: str) -> int:
    """Return the slot of a queue's keys in a cluster."""
    return key_slot(f"qworker:{queue}".encode())


class Topology(abc.ABC):
    """The servers of queues. Any event loop can use it."""

    def __init__(self, options: Options) -> None:
        self._options = options

    @abc.abstractmethod
    def known(self, slot: int) -> Address | None:
        """Return the server of a slot if it is known without asking."""

    @abc.abstractmethod
    async def discover(self, slot: int) -> Address:
        """Ask for the server of a slot.

        Raises:
            BackendUnavailable: No server knows.
        """

    @abc.abstractmethod
    def invalidate(self, slot: int, address: Address) -> None:
        """Record that a server failed or refused, so that the server of its slots must be found again."""

    def learn_redirect(self, redirected: Redirected, address: Address) -> Address | None:
        """Use a redirection by a server. Return the address that it names, if any."""
        self.invalidate(redirected.slot, address)
        return None

    def _settings(self, *, sentinel: bool) -> dict[str, Any]:
        """Return the settings of the connections that ask. They have no call with a deadline around them."""
        settings = connection_settings(self._options, sentinel=sentinel)
        return {**settings, "socket_timeout": self._options.timeout, "connection_class": connection_type(self._options)}


class _Single(Topology):
    """One server."""

    def known(self, slot: int) -> Address:
        return self._options.addresses[0]

    async def discover(self, slot: int) -> Address:
        return self._options.addresses[0]

    def invalidate(self, slot: int, address: Address) -> None:
        """Do nothing: there is no other server."""


class _Sentinel(Topology):
    """The primary of a name, as the first sentinel that answers reports it."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._sentinels = [address for address in options.addresses if isinstance(address, TcpAddress)]
        self._primary: Address | None = None

    def known(self, slot: int) -> Address | None:
        return self._primary

    async def discover(self, slot: int) -> Address:
        errors: list[str] = []
        for address in tuple(self._sentinels):
            try:
                found = await self._ask(address)
            except RedisError as error:
                errors.append(f"{address}: {reason_of(error)}")
                continue
            if found is not None:
                # A sentinel that does not answer costs a timeout only once.
                self._sentinels.sort(key=lambda each: each != address)
                self._primary = found
                return found
            errors.append(f"{address} has no {self._options.primary!r}")
        raise BackendUnavailable(f"no sentinel knows the primary: {'; '.join(errors)}")

    async def _ask(self, address: TcpAddress) -> Address | None:
        settings = self._settings(sentinel=True)
        pool = ConnectionPool(host=address.host, port=address.port, **settings)
        async with Redis.from_pool(pool) as sentinel:
            found = await cast("Any", sentinel).sentinel_get_master_addr_by_name(self._options.primary)
        return None if found is None else TcpAddress(found[0].decode(), found[1])

    def invalidate(self, slot: int, address: Address) -> None:
        if self._primary == address:
            self._primary = None
            # The sentinel that named it, which is the first one, may be cut off from the others.
            self._sentinels.append(self._sentinels.pop(0))


class _Cluster(Topology):
    """The nodes of a cluster by slot."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._slots: dict[int, Address] = {}
        self._nodes: list[Address] = list(options.addresses)
        # The name of the node that failed last, which is asked last.
        self._failed = ""

    def known(self, slot: int) -> Address | None:
        return self._slots.get(slot)

    async def discover(self, slot: int) -> Address:
        # redis-py's map of slots asks the nodes that were known last and those of the URL, in any order.
        settings = self._settings(sentinel=False)
        addresses = dict.fromkeys([*self._nodes, *self._options.addresses])
        nodes = [ClusterNode(each.host, each.port, **settings) for each in addresses if isinstance(each, TcpAddress)]
        manager = NodesManager(nodes, require_full_coverage=False, connection_kwargs=settings)
        try:
            await manager.initialize(last_failed_node_name=self._failed)
        except (RedisError, RedisClusterException) as error:
            raise BackendUnavailable(f"the cluster does not answer: {reason_of(error)}") from error
        finally:
            await manager.aclose("startup_nodes")
            await manager.aclose()
        self._slots = {
            each: TcpAddress(found[0].host, int(found[0].port)) for each, found in manager.slots_cache.items()
        }
        self._nodes = list(dict.fromkeys(self._slots.values()))
        if slot not in self._slots:
            raise BackendUnavailable(f"the cluster does not answer: no server has the slot {slot}")
        return self._slots[slot]

    def invalidate(self, slot: int, address: Address) -> None:
        self._failed = str(address)
        if self._slots.get(slot) == address:
            self._slots.pop(slot, None)

    def learn_redirect(self, redirected: Redirected, address: Address) -> Address | None:
        found = redirected.target
        if found is None:
            # This primary has become a replica, so it has none of its slots any more.
            self._slots = {slot: node for slot, node in self._slots.items() if node != address}
            return None
        if not found.host and isinstance(address, TcpAddress):
            found = TcpAddress(address.host, found.port)
        if redirected.code == "MOVED":
            self._slots[redirected.slot] = found
        return found


def make_topology(options: Options) -> Topology:
    """Make the topology of a URL."""
    kinds: dict[str, type[Topology]] = {"single": _Single, "sentinel": _Sentinel, "cluster": _Cluster}
    return kinds[options.mode](options)
