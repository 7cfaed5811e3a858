"""Bulk writes: rows wait in lists next to the queue, in its slot of a cluster, and a script moves them in batches.

The script that publishes a row also removes it from its list, so the rows in a list are those that are not published
yet. No row passes through the committing process.

    {qworker:Q}:stage:<load>/<run>                         set: the lists of a run; expires after 36 hours
    {qworker:Q}:stage:<load>/<run>/<partition>.<attempt>   list: rows; expires after 36 hours, unless it is sealed
    {qworker:Q}:seals                                      hash: <load>/<step> -> the manifest of an incomplete load
    {qworker:Q}:jobs                                       hash: load -> the mark of its last published step
"""

from __future__ import annotations

import struct
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import cast

import msgspec

from qworker.bulk.contract import (
    BulkWriter,
    IncompleteLoad,
    LoadDone,
    Manifest,
    StagedPartition,
    message_id,
    missing,
    sort_partitions,
)
from qworker.errors import BackendError, NotSupported
from qworker.kit.max_body import check_batches
from qworker.message import Draft
from qworker.names import check_queue
from qworker_redis.codec import encode
from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.keys import queue_key
from qworker_redis.register import QueueRegister
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, run_replicated
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["RedisBulkStore", "RedisBulkWriter", "delete_staged"]

_LIFE_MS = 36 * 3600 * 1000
_LENGTH = struct.Struct(">H")
_PLAIN = _LENGTH.pack(0)
_HELD, _SEALED = b"h", b"s"

_encode = msgspec.json.Encoder().encode
_read_manifest = msgspec.json.Decoder(Manifest).decode
_read_done = msgspec.json.Decoder(LoadDone).decode


class RedisBulkStore:
    """The bulk writes of a Redis, as a `qworker.bulk.contract.BulkStore`.

    Args:
        store: The store of the backend.
        register: Its register of queues.
    """

    def __init__(self, store: RedisStore, register: QueueRegister) -> None:
        self._store = store
        self._register = register

    def writer(self, queue: str, name: str) -> RedisBulkWriter:
        """Make a writer that stages in the queue's own slot."""
        return RedisBulkWriter(self._store, self._register, queue, name)

    async def incomplete_loads(self, queue: str) -> list[IncompleteLoad]:
        """Read the seals."""
        found = [
            seal
            for seal, kind in _parse_seals(await _read_seals(self._store.pool, check_queue(queue)))
            if kind == _SEALED
        ]
        return sorted(found, key=lambda each: each.manifest.sealed_at)


class RedisBulkWriter(BulkWriter):
    """The writer of one load.

    Args:
        store: The store of the backend.
        register: Its register of queues.
        queue: The queue of the messages.
        load: The load's name.
    """

    def __init__(self, store: RedisStore, register: QueueRegister, queue: str, load: str) -> None:
        super().__init__(queue, load)
        self._options = store.options
        self._pool = store.pool
        self._register = register

    async def done(self, step: int) -> LoadDone | None:
        """Read the mark."""
        return (await self._seal(step, b""))[0]

    async def sealed(self, step: int) -> Manifest | None:
        """Read the seal."""
        _, seal = await self._seal(step, b"")
        return _read_manifest(seal[1:]) if seal.startswith(_SEALED) else None

    # -- staging -----------------------------------------------------------------------------------------------------

    async def stage(
        self, run: str, partition: int, attempt: str, batches: Iterable[Sequence[Draft]]
    ) -> StagedPartition:
        """Push rows to a list. Each push gives the length that it expects, so it can be repeated."""
        name = f"{run}/{partition}.{attempt}"
        count = size = 0
        for drafts in check_batches(batches, self._options.max_body):
            rows: list[bytes] = []
            held = 0
            for draft in drafts:
                rows.append(_row(draft))
                size += len(draft.body)
                held += 1 + len(draft.body) // BATCH_BYTES
                if held >= BATCH:
                    count = await self._push(run, name, count, rows)
                    rows, held = [], 0
            if rows:
                count = await self._push(run, name, count, rows)
        return StagedPartition(run=run, partition=partition, attempt=attempt, count=count, size=size)

    async def _push(self, run: str, name: str, count: int, rows: list[bytes]) -> int:
        have = cast(
            "int", await self._script("stage", (count, _LIFE_MS, name, *rows), self._run(run), self._list(name))
        )
        if have != count + len(rows):
            raise BackendError(
                f"the staged rows of the load {self.name} have expired: its task took more than 36 hours"
            )
        return have

    async def discard(self, run: str) -> None:
        """Remove the run's lists, unless a seal names them."""
        seals = cast("list[bytes]", await self._command("HVALS", queue_key(self.queue, "seals")))
        if any(run in _read_manifest(seal[1:]).runs for seal in seals):
            return
        await self._remove_run(run)

    async def _remove_run(self, run: str) -> None:
        names = cast("list[bytes]", await self._command("SMEMBERS", queue_key(self.queue, self._run(run))))
        keys = [queue_key(self.queue, self._list(name.decode())) for name in names]
        for first in range(0, len(keys), BATCH):
            await self._command("UNLINK", *keys[first : first + BATCH])
        # The set comes last: as long as it exists, the lists can be found.
        await self._command("UNLINK", queue_key(self.queue, self._run(run)))

    # -- committing --------------------------------------------------------------------------------------------------

    async def seal(self, step: int, partitions: Sequence[StagedPartition]) -> Manifest | None:
        """Write the seal, keep its lists from expiring, then let it count."""
        # This comes first, because incomplete loads are searched for in the listed queues.
        await self._register.create(check_queue(self.queue))
        ours = _encode(Manifest(step=step, sealed_at=time.time(), partitions=sort_partitions(partitions)))
        while True:
            mark, seal = await self._seal(step, _HELD + ours)
            if mark is not None:
                return None
            manifest = _read_manifest(seal[1:])
            if seal.startswith(_SEALED):
                return manifest
            # The seal is this run's, or that of another run that stopped here. It counts if its lists exist: nothing of
            # it is published.
            absent = await self._persist(manifest)
            await self._seal(step, (b"=" if absent is None else b"!") + seal[1:])
            if absent is not None and seal[1:] == ours:
                raise missing(self.name, absent)

    async def _persist(self, manifest: Manifest) -> StagedPartition | None:
        """Keep the lists of a seal from expiring. Return the first that does not exist."""
        for partition in manifest.partitions:
            if partition.count and not await self._script("hold", (partition.count,), self._list_of(partition)):
                return partition
        return None

    async def _seal(self, step: int, wanted: bytes) -> tuple[LoadDone | None, bytes]:
        """Run the script `seal`. Return the mark if the step is done, and the seal or nothing."""
        mark, seal = cast("list[bytes]", await self._script("seal", (self.name, step, wanted)))
        published = _read_done(mark) if mark else None
        return (published if published is not None and published.step >= step else None), seal

    async def publish(self, manifest: Manifest) -> LoadDone:
        """Move every list by scripts, one after another, then write the mark."""
        for partition in manifest.partitions:
            # A script call blocks all other clients of the server.
            limit = max(1, BATCH // (1 + partition.size // max(1, partition.count) // BATCH_BYTES))
            head = message_id(self.name, manifest.step, partition.partition, 0)[:-1]
            left = partition.count
            while left:
                arguments = (limit, partition.count, head)
                new, left = cast("list[int]", await self._script("publish_staged", arguments, self._list_of(partition)))
                await self._register.on_stored(self.queue, bool(new))
        published = LoadDone(
            name=self.name, step=manifest.step, rows=manifest.rows, rejected=manifest.rejected, at=time.time()
        )
        await self._script("finish", (self.name, manifest.step, _encode(published)))
        for run in manifest.runs:
            await self._remove_run(run)
        return published

    async def forget(self) -> None:
        """Remove the mark."""
        await self._command("HDEL", queue_key(self.queue, "jobs"), self.name)

    # -- the server --------------------------------------------------------------------------------------------------

    async def _script(self, name: str, arguments: Sequence[Argument], *keys: str) -> Reply:
        """Run a script that can be repeated, until the number of replicas that the URL requires have its writes."""

        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            del again
            return run_replicated(self._options, self._pool, connection, name, self.queue, arguments, keys)

        return await self._pool.repeat(queue_slot(self.queue), attempt)

    async def _command(self, *arguments: Argument) -> Reply:
        return await self._pool.command(queue_slot(self.queue), *arguments)

    def _run(self, run: str) -> str:
        return f"stage:{self.name}/{run}"

    def _list(self, name: str) -> str:
        return f"stage:{self.name}/{name}"

    def _list_of(self, partition: StagedPartition) -> str:
        return self._list(f"{partition.run}/{partition.partition}.{partition.attempt}")


async def delete_staged(pool: ConnectionPool, queue: str) -> None:
    """Delete the lists that seals keep from expiring. Lists that are not sealed expire by themselves."""
    keys: set[bytes] = set()
    for seal, _ in _parse_seals(await _read_seals(pool, queue)):
        for partition in seal.manifest.partitions:
            keys |= {
                queue_key(queue, f"stage:{seal.name}/{partition.run}"),
                queue_key(queue, f"stage:{seal.name}/{partition.run}/{partition.partition}.{partition.attempt}"),
            }
    staged = sorted(keys)
    for first in range(0, len(staged), BATCH):
        await pool.command(queue_slot(queue), "UNLINK", *staged[first : first + BATCH])


async def _read_seals(pool: ConnectionPool, queue: str) -> list[bytes]:
    """Read the hash of seals: names and manifests alternate."""
    return cast("list[bytes]", await pool.command(queue_slot(queue), "HGETALL", queue_key(queue, "seals")))


def _parse_seals(fields: Sequence[bytes]) -> Iterator[tuple[IncompleteLoad, bytes]]:
    """Yield each seal, and its state: `h` for held, `s` for sealed."""
    for field, seal in zip(fields[::2], fields[1::2], strict=True):
        load = field.decode().rpartition("/")[0]
        yield IncompleteLoad(name=load, manifest=_read_manifest(seal[1:])), seal[:1]


def _row(draft: Draft) -> bytes:
    """Encode a draft in the form in which it waits in a list.

    Raises:
        NotSupported: It has options of a unique key, which the commit does not read.
    """
    if draft.unique is not None:
        raise NotSupported("redis: does not support options of unique keys in bulk writes: enqueue these calls instead")
    # The mark of a load keeps its ids taken.
    _, special, rest = encode("", msgspec.structs.replace(draft, hold=0.0) if draft.hold else draft)
    return _LENGTH.pack(len(special)) + special + rest if special else _PLAIN + rest
