"""Find the server of a queue: the one of the URL, the primary that the sentinels know, or the node of a cluster.

Discovery blocks and runs in threads. It is rare, and `extend` must be able to do it while the event loop is blocked.
"""

from __future__ import annotations

import abc
import binascii
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from qworker.errors import BackendError, BackendUnavailable
from qworker_redis.blocking_connection import BlockingConnection
from qworker_redis.error_replies import Redirected, Reply
from qworker_redis.options import Address, Options, TcpAddress

__all__ = ["Topology", "key_slot", "make_topology", "queue_slot"]

_SLOTS = 16384


@lru_cache(4096)
def queue_slot(queue: str) -> int:
    """Return the slot of a queue's keys in a cluster."""
    return key_slot(f"qworker:{queue}".encode())


def key_slot(tag: bytes) -> int:
    """Return the slot of a key without braces, or of the text between its braces: CRC-16 (XModem)."""
    return binascii.crc_hqx(tag, 0) % _SLOTS


class Topology(abc.ABC):
    """The servers of queues. It is safe to use from any thread."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()

    @abc.abstractmethod
    def known(self, slot: int) -> Address | None:
        """Return the server of a slot if it is known without asking."""

    @abc.abstractmethod
    def discover(self, slot: int) -> Address:
        """Ask for the server of a slot. Blocks.

        Raises:
            BackendUnavailable: No server knows.
        """

    @abc.abstractmethod
    def invalidate(self, slot: int, address: Address) -> None:
        """Record that a server failed or refused, so that the server of its slots must be found again."""

    def learn_redirect(self, redirected: Redirected, address: Address) -> Address | None:
        """Use a redirection. Return the address that it names, if any."""
        self.invalidate(-1, address)
        del redirected
        return None


class _Single(Topology):
    """One server."""

    def known(self, slot: int) -> Address:
        return self._options.addresses[0]

    def discover(self, slot: int) -> Address:
        return self._options.addresses[0]

    def invalidate(self, slot: int, address: Address) -> None:
        """Do nothing: there is no other server."""


class _Sentinel(Topology):
    """The primary of a name, as the first sentinel that answers reports it."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._primary: Address | None = None

    def known(self, slot: int) -> Address | None:
        return self._primary

    def discover(self, slot: int) -> Address:
        with self._lock:
            errors: list[str] = []
            for address in self._options.addresses:
                try:
                    found = self._ask(address)
                except BackendError as error:
                    errors.append(str(error))
                    continue
                if found is not None:
                    self._primary = found
                    return found
                errors.append(f"the sentinel {address} knows no {self._options.primary!r}")
            raise BackendUnavailable(f"no sentinel knows the primary: {'; '.join(errors)}")

    def _ask(self, address: Address) -> Address | None:
        """Return the primary that one sentinel names, if that server agrees."""
        with BlockingConnection(self._options, address, sentinel=True) as sentinel:
            reply = sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._options.primary)
        if not isinstance(reply, list):
            return None
        host, port = cast("list[bytes]", reply)
        found = TcpAddress(host.decode(), int(port))
        with BlockingConnection(self._options, found) as server:
            role = cast("Sequence[Reply]", server.call("ROLE"))[0]
        if role != b"master":
            raise BackendUnavailable(f"sentinel {address} points to {found}, which is not a primary yet")
        return found

    def invalidate(self, slot: int, address: Address) -> None:
        if self._primary == address:
            self._primary = None


class _Cluster(Topology):
    """The nodes of a cluster by slot."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._slots: dict[int, Address] = {}
        self._nodes: list[Address] = list(options.addresses)

    def known(self, slot: int) -> Address | None:
        return self._slots.get(slot)

    def discover(self, slot: int) -> Address:
        with self._lock:
            errors: list[str] = []
            for address in [*self._nodes, *self._options.addresses]:
                try:
                    with BlockingConnection(self._options, address) as node:
                        reply = node.call("CLUSTER", "SLOTS")
                except BackendError as error:
                    errors.append(str(error))
                    continue
                self._learn(cast("list[list[Reply]]", reply), address)
                found = self._slots.get(slot)
                if found is not None:
                    return found
                errors.append(f"no server has the slot {slot}")
            raise BackendUnavailable(f"the cluster does not answer: {'; '.join(dict.fromkeys(errors))}")

    def _learn(self, ranges: list[list[Reply]], asked: Address) -> None:
        slots: dict[int, Address] = {}
        nodes: dict[Address, None] = {}
        for row in ranges:
            first, last, primary = cast("tuple[int, int, list[Reply]]", row[:3])
            host, port = cast("tuple[bytes | None, int]", primary[:2])
            address = TcpAddress(host.decode() if host else cast("TcpAddress", asked).host, port)
            nodes[address] = None
            slots.update(dict.fromkeys(range(first, last + 1), address))
        self._slots = slots
        self._nodes = list(nodes)

    def invalidate(self, slot: int, address: Address) -> None:
        if self._slots.get(slot) == address:
            self._slots.pop(slot, None)

    def learn_redirect(self, redirected: Redirected, address: Address) -> Address | None:
        if redirected.code == "READONLY":
            self._slots = {slot: node for slot, node in self._slots.items() if node != address}
            return None
        slot, _, target = redirected.rest.partition(" ")
        host, _, port = target.rpartition(":")
        found = TcpAddress(host.strip("[]") or cast("TcpAddress", address).host, int(port))
        if redirected.code == "MOVED":
            self._slots[int(slot)] = found
        return found


def make_topology(options: Options) -> Topology:
    """Make the topology of a URL."""
    kinds: dict[str, type[Topology]] = {"single": _Single, "sentinel": _Sentinel, "cluster": _Cluster}
    return kinds[options.mode](options)
