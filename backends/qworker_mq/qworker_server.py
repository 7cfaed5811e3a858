"""`mq+http://[:TOKEN@]host[:port]` and `mq+https:`: the queues of a server, such as `qworker serve`.

The token can also come from QWORKER_HTTP_TOKEN. A server of another implementation, which has only mq's endpoints, is
reached with `?standard_only=1` (see `standard_server`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import msgspec

from qworker.backend import Backend
from qworker.backend.deviations import no_cells, refuse_cancel, refuse_unsupported, refuse_watches
from qworker.cell import Cell, CellOp, CellReply, CellWatch
from qworker.clock import SYSTEM_CLOCK, Clock
from qworker.errors import BackendUnavailable, InvalidURL
from qworker.kit.parts import WHOLE
from qworker.kit.wait import wait_for_ready
from qworker.message import (
    Cancelled,
    Draft,
    Lease,
    Query,
    QueueStats,
    ReapResult,
    Selection,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import check_queue, forms_of_all
from qworker.url import BackendURL
from qworker_mq import native_calls
from qworker_mq.native_calls import native_path
from qworker_mq.remote_history import RemoteHistory
from qworker_mq.server_client import ServerClient, decode, keep_or_release

__all__ = ["QworkerServerBackend"]


class _ServerInfo(msgspec.Struct):
    durability: str
    deviations: dict[str, str]
    history: bool = False
    version: str = ""

    def refuse_if_old(self, server: str) -> None:
        """Refuse a server whose leases could not be extended or settled.

        Raises:
            BackendUnavailable: It is of 0.1. A worker with `--wait-for-backend` waits for its upgrade.
        """
        if self.version.startswith("0.1."):
            raise BackendUnavailable(f"{server} is qworker {self.version}: upgrade the server to 0.2 first")


# What the server cannot say, whatever its backend can do.
_UNSUPPORTED = {"unique_app": "the server's answer does not name another queue"}


class QworkerServerBackend(Backend):
    """The queues of a qworker server. They have the behaviour of its backend.

    Args:
        url: The server.
        clock: The source of the time.
        remote_leases: See `Backend.from_url`.
    """

    deviations: ClassVar[Mapping[str, str]] = {
        **_UNSUPPORTED,
        "cells": "the server has no endpoint for them",
        "cancel": "the server has no endpoint for it",
        "lost_leases": "the leases are the server's: the next extension shows that one is lost",
        "keep_done": "the server's own URL decides which messages are kept",
        "max_body": "the server's own URL and --max-body-size decide how large a body can be",
        "max_body_stored": "the server's own URL decides which messages are leased",
    }

    def __init__(self, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> None:
        self._server = ServerClient(url)
        self._clock = clock
        self.remote_leases = native_calls.RemoteServerLeases(self._server, clock) if remote_leases else None
        self._durability: str | None = None
        # Whether the server has a history is known when the backend is open.
        self._wants_history = url.boolean("history", True)

    @classmethod
    def from_url(cls, url: BackendURL, *, clock: Clock = SYSTEM_CLOCK, remote_leases: bool = False) -> Self:
        """Create an instance for `mq+http://[:TOKEN@]host[:port][?standard_only=1|history=0]`.

        With `standard_only=1` it is a `StandardServerBackend`: the scheme says nothing about the server.
        """
        url.only({"standard_only", "history"})
        if url.boolean("standard_only", False):
            from qworker_mq.standard_server import StandardServerBackend

            return cast("Self", StandardServerBackend(url, clock=clock))
        return cls(url, clock=clock, remote_leases=remote_leases)

    async def open(self) -> None:
        """Ask the server for its durability and deviations.

        Raises:
            BackendUnavailable: The server is of 0.1, whose endpoints have other names.
        """
        answer = await self._server.get_unchecked("/-/about")
        if answer.status == 404:
            raise InvalidURL(f"{self.describe()} has mq's endpoints only: add ?standard_only=1")
        info = decode(self._server.check(answer), _ServerInfo)
        info.refuse_if_old(self.describe())
        self._durability = info.durability
        # The deviations of this instance are those of the server's backend, in addition to those of the class.
        vars(self)["deviations"] = {**info.deviations, **type(self).deviations}
        if info.history and self._wants_history and not self.history.enabled:
            self.history = RemoteHistory(self._server)

    async def aclose(self) -> None:
        """Close the connections."""
        await self.history.aclose()
        await self._server.aclose()

    def describe(self) -> str:
        """Return the URL with its token masked."""
        return self._server.url

    @property
    def durability(self) -> str:
        """The durability of the server's backend, if this one is open."""
        return self._durability or "none"

    # -- producing ---------------------------------------------------------------------------------------------------

    async def publish(self, queue: str, drafts: Sequence[Draft]) -> list[str]:
        """Store messages."""
        refuse_unsupported("mq+http", _UNSUPPORTED, drafts)
        return await native_calls.publish(self._server, queue, drafts)

    # -- consuming ---------------------------------------------------------------------------------------------------

    async def lease(self, queue: str, limit: int, visibility: float, timeout: float = 0.0) -> list[Lease]:
        """Lease messages."""
        await wait_for_ready(self, queue, limit, timeout)
        return await keep_or_release(native_calls.lease(self._server, queue, limit, visibility), self.settle)

    async def wait(self, queues: Sequence[str], timeout: float, cells: Sequence[CellWatch] = ()) -> None:
        """Let the server wait for a message."""
        refuse_watches("mq+http", self.deviations, cells)
        await native_calls.wait(self._server, queues, timeout)

    def extend(self, leases: Sequence[Lease], visibility: float) -> list[Lease]:
        """Extend leases."""
        return native_calls.extend(self._server, leases, visibility)

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        """End leases."""
        return await native_calls.settle(self._server, settlements)

    async def reap(self, queue: str) -> ReapResult:
        """Let the server reap, as it does every second anyway. The leases are the server's."""
        count = await native_calls.call_for_count(self._server, "reap", queue)
        return ReapResult(count, now=self._clock.time())

    # -- cells ---------------------------------------------------------------------------------------------------------

    async def cells(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Refuse: the server has no endpoint for them."""
        raise no_cells("mq+http", self.deviations)

    # -- queues --------------------------------------------------------------------------------------------------------

    async def queues(self) -> list[str]:
        """Return the names of the queues."""
        return decode(await self._server.ask("GET", "/-/queues"), list[str])

    async def create(self, queue: str) -> None:
        """Create a queue."""
        await self._server.ask("PUT", f"/{check_queue(queue)}", queue=queue)

    async def delete(self, queue: str) -> None:
        """Delete a queue."""
        await self._server.ask("DELETE", f"/{check_queue(queue)}", queue=queue)

    async def stats(self, queue: str) -> QueueStats:
        """Count the messages of a queue."""
        return decode(await self._server.ask("GET", native_path(queue, "stats"), queue=queue), QueueStats)

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        await self._server.ask("POST", native_path(queue, "pause"), queue=queue)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        await self._server.ask("POST", native_path(queue, "resume"), queue=queue)

    # -- messages ------------------------------------------------------------------------------------------------------

    def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Yield the messages in a state."""
        return native_calls.browse(self._server, queue, query)

    async def parts(self, queue: str, state: State, count: int) -> list[str]:
        """Return one part, because every message passes through the server."""
        await self.stats(queue)
        return [WHOLE]

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Find messages by their ids."""
        return await native_calls.find(self._server, queue, forms_of_all(ids))

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready."""
        selection.require_failed()
        return await native_calls.call_for_count(self._server, "requeue", queue, _to_json(selection))

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        return await native_calls.call_for_count(self._server, "remove", queue, _to_json(selection))

    async def cancel(
        self, queue: str, selection: Selection, by: str = "", only: Mapping[str, Cell] | None = None
    ) -> list[Cancelled]:
        """Refuse: the server has no endpoint for it."""
        refuse_cancel("mq+http", self.deviations)


def _to_json(selection: Selection) -> dict[str, Any]:
    """Return the JSON of a selection, which has no text that cannot be an id."""
    return (selection if selection.ids is None else Selection(ids=forms_of_all(selection.ids))).to_json()
