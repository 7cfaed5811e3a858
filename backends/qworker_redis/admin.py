"""The part of the backend that looks after queues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import ClassVar, TypeVar, cast

from qworker.backend import Backend
from qworker.errors import BackendError, QueueNotFound
from qworker.kit.browse import bad_position, place_of, position_of
from qworker.kit.parts import PAGE_BYTES, pages
from qworker.message import (
    FinishedMessage,
    Message,
    Query,
    QueueStats,
    Selection,
    State,
    StoredMessage,
    to_microseconds,
)
from qworker.names import check_queue
from qworker_redis.bulk import staged_keys
from qworker_redis.codec import decode, enqueued_at
from qworker_redis.connection import Argument, Connection
from qworker_redis.connections import ConnectionPool
from qworker_redis.error_replies import Reply
from qworker_redis.options import Options
from qworker_redis.scripts import queue_key
from qworker_redis.topology import queue_slot

__all__ = ["Administration", "encode_text", "ids_and_times", "in_batches", "parse_stored"]

T = TypeVar("T")

# Messages per script call: a server does nothing else meanwhile.
_BATCH = 500
# As many before it is known how large they are.
_FIRST = 100
# What a list can have.
_MOST_ROWS = 1 << 48
# The key with the names of all queues is `qworker:queues`: its slot is that of a queue of this name.
_REGISTER = b"qworker:queues"
_REGISTER_SLOT = queue_slot("queues")
_PARTS = (
    "meta",
    "msg",
    "ready",
    "sorted",
    "delayed",
    "leased",
    "claims",
    "keys",
    "errors",
    "fail",
    "done",
    "gone",
    "wake",
    "history",
    "jobs",
    "seals",
)


class Administration(Backend):
    """Queues as administrators see them."""

    _pool: ConnectionPool
    _options: Options
    # States in which a page can show again what an earlier one has shown.
    _moving: ClassVar[frozenset[State]] = frozenset({State.LEASED})
    # Queues that this instance has put into the register.
    _registered: set[str]

    async def queues(self) -> list[str]:
        """The names of all queues, sorted."""
        names = cast("list[bytes]", await self._command(_REGISTER_SLOT, "SMEMBERS", _REGISTER))
        return sorted(name.decode() for name in names)

    async def create(self, queue: str) -> None:
        """Make a queue. Idempotent."""
        check_queue(queue)
        await self._pool.run_script("create", queue, ("create",))
        await self._list_queue(queue)

    async def _list_queue(self, queue: str) -> None:
        """Have a queue listed, if it is not."""
        # A full store refuses writes, and a worker that only consumes must be able to start there.
        if queue not in await self.queues():
            await self._register(queue)

    async def _register(self, queue: str) -> None:
        await self._command(_REGISTER_SLOT, "SADD", _REGISTER, queue)
        self._registered.add(queue)

    async def delete(self, queue: str) -> None:
        """Remove a queue and every message in it. Idempotent."""
        check_queue(queue)
        self._registered.discard(queue)
        await self._delete_staged(queue)
        await self._command(queue_slot(queue), "UNLINK", *[queue_key(queue, part) for part in _PARTS])
        # Last: a queue that is half deleted is still listed, and can be deleted again.
        await self._command(_REGISTER_SLOT, "SREM", _REGISTER, queue)

    async def _delete_staged(self, queue: str) -> None:
        """Remove what bulk writes have sealed; what they have not is forgotten by itself."""
        keys = staged_keys(queue, await self._sealed(queue))
        for first in range(0, len(keys), _BATCH):
            await self._command(queue_slot(queue), "UNLINK", *keys[first : first + _BATCH])

    async def _sealed(self, queue: str) -> list[bytes]:
        """The hash of seals: names and manifests in turns."""
        return cast("list[bytes]", await self._command(queue_slot(queue), "HGETALL", queue_key(queue, "seals")))

    async def _command(self, slot: int, *arguments: Argument) -> Reply:
        async def attempt(connection: Connection, again: bool) -> Reply:
            del again
            return await connection.send(*arguments)

        return await self._pool.repeat(slot, attempt)

    async def _found(self, name: str, queue: str, arguments: Sequence[Argument]) -> list[Reply]:
        """A script's list; an empty one says that there is no queue."""
        reply = cast("list[Reply]", await self._pool.run_script(name, check_queue(queue), arguments))
        if not reply:
            raise QueueNotFound(queue)
        return reply

    async def _counted(self, name: str, queue: str, arguments: Sequence[Argument]) -> int:
        """A script's count; -1 says that there is no queue."""
        count = cast("int", await self._pool.run_script(name, check_queue(queue), arguments))
        if count < 0:
            raise QueueNotFound(queue)
        return count

    async def stats(self, queue: str) -> QueueStats:
        """Count a queue."""
        ready, leased, delayed, done, fail, down, now, oldest = cast(
            "tuple[int, int, int, int, int, int, int, list[bytes]]", await self._found("stats", queue, ())
        )
        since = min((enqueued_at(value) for value in oldest), default=None)
        return QueueStats(
            queue=queue,
            ready=ready,
            leased=leased,
            delayed=delayed,
            done=done,
            failed=fail,
            oldest_age_s=None if since is None else max(0.0, now / 1e6 - since),
            paused=bool(down),
            retention={
                "done": self._options.keep_done.describe(),
                "failed": self._options.keep_failed.describe(),
                "history": self.history.describe_retention(),
            },
        )

    async def browse(self, queue: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
        """Look at messages of a state in its order. A page is one call, and begins where the one before it has ended."""
        left, count = query.limit, _FIRST
        after = self._place(query)
        # A lease that is extended is seen twice.
        given: set[str] = set()
        while True:
            wanted = count if left is None else min(count, left)
            reply = await self._found("look", queue, (query.state.value, wanted, int(query.newest), *after))
            seen = [stored for stored in self._stored(queue, reply) if stored.message.id not in given]
            given.update([stored.message.id for stored in seen] if query.state in self._moving else [])
            async for page in pages(seen):
                yield page
            left = None if left is None else left - len(seen)
            if reply[0] == 1 or left == 0:
                return
            after = tuple(cast("list[bytes | int]", reply[0]))
            # No more at once than a page holds, as far as can be told from the last ones.
            size = sum(len(stored.message.body) for stored in seen) // max(1, len(seen))
            count = max(1, min(_BATCH, PAGE_BYTES // max(1, size)))

    def _place(self, query: Query) -> tuple[Argument, ...]:
        """Where to go on, as `look` takes it.

        Raises:
            UsageError: `after` is no position.
        """
        place = place_of(query.after)
        if place is None:
            return ("e", "", "", "") if query.state is State.READY else ()
        number, text = place
        if query.state is not State.READY:
            return _decimal(number), encode_text(text)
        kind, *rest = text.split("~")
        if kind not in {"l", "s"} or len(rest) != 2 or (number >= 0) != bool(rest[0]) or number > _MOST_ROWS:
            raise bad_position(query.after or "")
        return kind, (_decimal(number) if rest[0] else ""), *map(encode_text, rest)

    def _stored(self, queue: str, reply: Sequence[Reply]) -> Iterator[StoredMessage]:
        """What `look` has answered for a state, with positions."""
        return parse_stored(queue, reply, positions=True)

    async def find(self, queue: str, ids: Sequence[str]) -> list[StoredMessage]:
        """Look at messages."""
        found: list[StoredMessage] = []
        for batch in in_batches(ids):
            found += parse_stored(queue, await self._found("look", queue, ("id", *batch)))
        return found

    async def requeue(self, queue: str, selection: Selection) -> int:
        """Make failed messages ready, with no tries."""
        selection.require_failed()
        if selection.state is not None:
            return await self._count_all("requeue", queue, (), (await self.stats(queue)).failed)
        if selection.ids is not None:
            # Without an id the script would requeue the oldest ones.
            calls: list[tuple[Argument, ...]] = [(0, *batch) for batch in in_batches(selection.ids) if batch]
        else:
            calls = [("unchanged", *ids_and_times(batch)) for batch in in_batches(selection.unchanged or ())]
        if not calls:
            await self._found("stats", queue, ())
        return sum([await self._counted("requeue", queue, call) for call in calls])

    async def remove(self, queue: str, selection: Selection) -> int:
        """Delete messages."""
        if selection.ids is not None:
            return sum([await self._counted("remove", queue, ("ids", *batch)) for batch in in_batches(selection.ids)])
        if selection.unchanged is not None:
            return sum([await self._remove_unchanged(queue, batch) for batch in in_batches(selection.unchanged)])
        state = selection.state
        assert state is not None
        stats = await self.stats(queue)
        count = {
            State.READY: stats.ready,
            State.DELAYED: stats.delayed,
            State.FAILED: stats.failed,
            State.LEASED: stats.leased,
            State.DONE: stats.done,
        }[state]
        return await self._count_all("remove", queue, (state.value,), count)

    async def _count_all(self, name: str, queue: str, arguments: tuple[Argument, ...], there: int) -> int:
        """Have a script take as many messages as there were, in batches: what arrives meanwhile may stay, or this might never end."""
        total = 0
        while total < there:
            count = await self._counted(name, queue, (*arguments, min(there - total, _BATCH)))
            if not count:
                break
            total += count
        return total

    async def _remove_unchanged(self, queue: str, found: Sequence[FinishedMessage]) -> int:
        arguments: list[Argument] = []
        for one in found:
            arguments += [one.state.value, *ids_and_times([one])]
        return await self._counted("discard", queue, arguments)

    async def pause(self, queue: str) -> None:
        """Pause a queue."""
        await self._found_or_not("down", queue)

    async def resume(self, queue: str) -> None:
        """Resume a queue."""
        await self._found_or_not("up", queue)

    async def _found_or_not(self, what: str, queue: str) -> None:
        if not await self._pool.run_script("create", check_queue(queue), (what,)):
            raise QueueNotFound(queue)


def in_batches(chosen: Iterable[T]) -> list[list[T]]:
    """What is chosen, each once, in as many as one script call takes; at least one batch, whose call says that there is no queue."""
    unique = list(dict.fromkeys(chosen))
    return [unique[first : first + _BATCH] for first in range(0, max(1, len(unique)), _BATCH)]


def ids_and_times(found: Iterable[FinishedMessage]) -> list[Argument]:
    """The id and the time of each, in microseconds."""
    return [argument for one in found for argument in (one.id, to_microseconds(one.finished_at) or 0)]


def encode_text(text: str) -> bytes:
    """A text of `place_of` as it was in the store."""
    return text.encode(errors="surrogateescape")


def _decimal(number: float) -> str:
    return f"{number:.0f}"


def parse_stored(queue: str, reply: Sequence[Reply], *, positions: bool = False) -> Iterator[StoredMessage]:
    """What `look` has answered: [1, then for each message: id, value, state, place, claim, error]."""
    rows = cast("Sequence[bytes]", reply)
    for at in range(1, len(rows), 6):
        name, value, state, place, claim, error = rows[at : at + 6]
        message_id, where = name.decode(), State(state.decode())
        when = 0.0 if where is State.READY else float(place) / 1e6
        try:
            message = decode(queue, message_id, value)
        except BackendError:
            # Shown as it is, so that somebody can see and remove it.
            message = Message(id=message_id, queue=queue, body=value)
        yield StoredMessage(
            message=message,
            state=where,
            due_at=when if where is State.DELAYED else None,
            expires_at=when if where is State.LEASED else None,
            finished_at=when if where in {State.DONE, State.FAILED} else None,
            holder=claim.decode().partition(" ")[2].rpartition("/")[0] or None,
            error=error.decode(errors="replace") or None,
            position=_position(where, message_id, place.decode()) if positions else None,
        )


def _position(state: State, message_id: str, place: str) -> str:
    if state is not State.READY:
        return position_of((int(float(place)), message_id))
    kind, number, rest = place.split("~", 2)
    return position_of((int(number or -1), f"{kind}~{rest}"))
