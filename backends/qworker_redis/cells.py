"""The operations on the cells of one queue, and the script that carries them out."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Iterator, Sequence
from typing import cast

import msgspec

from qworker.cell import CELLS_PER_PAGE, Cell, CellOp, CellReply
from qworker_redis.connection import Argument, Connection, pack
from qworker_redis.error_replies import Reply
from qworker_redis.keys import queue_key
from qworker_redis.register import QueueRegister
from qworker_redis.replica_wait import BATCH, BATCH_BYTES, run_replicated
from qworker_redis.store import RedisStore
from qworker_redis.topology import queue_slot

__all__ = ["RedisCells", "channel_of", "is_sharded", "member_of"]

# One operation, and the new version of a put.
_Op = tuple[CellOp, str]
# Queues that are looked at in one round trip.
_LOOKS = 500
# Operations that may write: replicas have to confirm them.
_WRITES = frozenset({"put", "delete", "close"})


class RedisCells:
    """The cells of one backend.

    Args:
        store: The store of the backend.
        register: The register of queues, in which a put adds its queue.
    """

    def __init__(self, store: RedisStore, register: QueueRegister) -> None:
        self._store = store
        self._pool = store.pool
        self._register = register

    async def carry_out(self, queue: str, ops: Sequence[CellOp]) -> list[CellReply]:
        """Carry out operations. If an answer was lost, the batch is repeated: a put knows its own version."""
        replies: list[CellReply] = []
        for batch in _batches([(op, secrets.token_hex(8) if op.do == "put" else "") for op in ops]):
            arguments = [part for op, version in batch for part in _arguments(op, version)]
            writes = any(op.do in _WRITES for op, _ in batch)
            new, *answers = await self._run(queue, arguments, writes=writes)
            if any(op.do == "put" for op, _ in batch):
                await self._register.on_stored(queue, bool(new))
            replies += [_parse(op, version, answer) for (op, version), answer in zip(batch, answers, strict=True)]
        return replies

    async def versions(self, queue: str, members: Sequence[bytes]) -> list[str]:
        """Return the versions of some cells of a queue; empty for one that is absent."""
        arguments = [part for member in members for part in ("version", member, "")]
        _, *answers = await self._run(queue, arguments, writes=False)
        return [cast("list[list[bytes]]", answer)[2][1].decode() if answer[0] else "" for answer in answers]

    async def queues_with_cells(self, queues: Sequence[str], group: str) -> list[str]:
        """Return the queues that may have cells of a group. A refused look may be that of a queue with some."""
        if self._store.options.mode == "cluster":
            # Each slot would need a look of its own.
            return list(queues)
        encoded = _encode_group(group)
        row = (b"[" + encoded + b"\0", b"(" + encoded + b"\1", "LIMIT", 0, 1)
        found: list[str] = []
        for first in range(0, len(queues), _LOOKS):
            names = queues[first : first + _LOOKS]
            looks = [pack(("ZRANGEBYLEX", queue_key(name, "cellnames"), *row)) for name in names]
            replies = await self._pool.send_once(queue_slot(names[0]), looks)
            found += [name for name, reply in zip(names, replies, strict=True) if reply != []]
        return found

    async def _run(self, queue: str, arguments: Sequence[Argument], *, writes: bool) -> list[list[object]]:
        def attempt(connection: Connection, again: bool) -> Awaitable[Reply]:
            del again
            publish = "SPUBLISH" if is_sharded(self._store, connection) else "PUBLISH"
            whole = (channel_of(queue, b""), publish, *arguments)
            if writes:
                return run_replicated(self._store.options, self._pool, connection, "cells", queue, whole, ())
            return self._pool.evaluate(connection, "cells", queue, whole)

        return cast("list[list[object]]", await self._pool.repeat(queue_slot(queue), attempt))


def is_sharded(store: RedisStore, connection: Connection) -> bool:
    """Return whether the messages of channels stay on the server of their slot."""
    return store.options.mode == "cluster" and connection.takes_flags


def member_of(group: str, name: str) -> bytes:
    """Return the field of a cell, whose order is that of the names. The group ends at the first byte 0."""
    return _encode_group(group) + b"\0" + name.encode()


def channel_of(queue: str, member: bytes) -> bytes:
    """Return the channel on which changes of a cell are published."""
    return queue_key(queue, "cell:") + member


def _encode_group(group: str) -> bytes:
    """Return a group without a byte 0. The encoding keeps the order."""
    return group.encode().replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")


def _decode_group(encoded: bytes) -> str:
    return encoded.replace(b"\1\1", b"\0").replace(b"\1\2", b"\1").decode(errors="replace")


def _batches(ops: Sequence[_Op]) -> Iterator[list[_Op]]:
    """Divide operations into script calls of a bounded size."""
    batch: list[_Op] = []
    size = 0
    for op in ops:
        size += 1 + len(op[0].cell.value) // BATCH_BYTES + (CELLS_PER_PAGE if op[0].do == "list" else 0)
        if batch and size > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(op)
    if batch:
        yield batch


def _arguments(op: CellOp, version: str) -> list[Argument]:
    cell = op.cell
    if op.do == "list":
        group = _encode_group(cell.group)
        if not group:
            return ["groups", _encode_group(cell.name), CELLS_PER_PAGE]
        return ["list", member_of(cell.group, cell.name), group, CELLS_PER_PAGE]
    if op.do == "close":
        return ["close", _encode_group(cell.group), ""]
    arguments: list[Argument] = [op.do, member_of(cell.group, cell.name), "" if op.only is None else f"={op.only}"]
    if op.do == "put":
        arguments += [version, "" if cell.ttl is None else max(1, int(cell.ttl * 1e6)), cell.rank, cell.value]
    return arguments


def _parse(op: CellOp, version: str, answer: Sequence[object]) -> CellReply:
    done, empty, *rows = answer
    if op.do == "list":
        found = [_to_cell(row, op.cell.group) for row in cast("list[list[bytes]]", rows)]
        return CellReply(True, cells=found, empty=bool(empty))
    if op.do == "put" and done:
        return CellReply(True, msgspec.structs.replace(op.cell, version=version))
    cell = _to_cell(cast("list[bytes]", rows[0]), op.cell.group) if rows else None
    return CellReply(bool(done), cell, empty=bool(empty))


def _to_cell(row: Sequence[bytes], group: str) -> Cell:
    member, version, left, rank, value = row
    encoded, _, name = member.partition(b"\0")
    ttl = int(left) / 1e6 if left else None
    return Cell(group or _decode_group(encoded), name.decode(errors="replace"), value, version.decode(), ttl, int(rank))
