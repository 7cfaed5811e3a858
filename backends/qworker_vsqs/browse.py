"""Reading a queue without leasing: list, browse, find."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Container, Sequence

from qworker.kit.body_slices import OwnDescriptor, leave_unread
from qworker.kit.browse import Chosen, Place, at_most, browse_rows, browse_share
from qworker.kit.files import list_names
from qworker.kit.find import find_each, stamp
from qworker.kit.max_body import describe_too_large
from qworker.kit.parts import HashShare
from qworker.kit.store_errors import store_errors
from qworker.message import Query, State, StoredMessage
from qworker_vsqs.lease import make_message
from qworker_vsqs.names import Unit, leased_name, parse
from qworker_vsqs.queue_dir import MessageInfo, QueueDirectory
from qworker_vsqs.store import VsqsStore

__all__ = ["ListedMessage", "browse", "file_name", "find", "list_states"]

# Id, expiry in ticks, info.
ListedMessage = tuple[int, int | None, MessageInfo]


async def browse(store: VsqsStore, name: str, query: Query) -> AsyncIterator[list[StoredMessage]]:
    """Yield the messages of a state, page by page."""
    queue = store.require(name)
    with store_errors(f"browse {name}"):
        pages = (
            _browse_in_order(store, queue, query)
            if query.part is None
            else at_most(query.limit, _browse_share(store, queue, query.state, HashShare.parse(query.part)))
        )
        async for page in pages:
            yield page


async def _browse_in_order(store: VsqsStore, queue: QueueDirectory, query: Query) -> AsyncIterator[list[StoredMessage]]:
    async def choose(after: Place | None, limit: int | None) -> list[ListedMessage]:
        chosen = Chosen(place, after, limit, newest=query.newest)
        chosen.add((await list_states(store, queue))[query.state])
        return chosen.rows()

    def place(listed: ListedMessage) -> Place:
        number, expiry, info = listed
        if query.state is State.READY:
            return number, ""
        return (info.failed_at or 0.0) if query.state is State.FAILED else (expiry or 0), f"{number:020}"

    # Extending a lease gives the message another name.
    identity = _message_id if query.state is State.LEASED else None
    read = _make_reader(store, queue, query.state)
    async for page in browse_rows(query, choose, place, read, identity=identity):
        yield page


async def _browse_share(
    store: VsqsStore, queue: QueueDirectory, state: State, share: HashShare
) -> AsyncIterator[list[StoredMessage]]:
    async def list_share() -> list[ListedMessage]:
        return [listed for listed in (await list_states(store, queue))[state] if share.has(_message_id(listed))]

    # Extending a lease gives the message another name.
    identity = _message_id if state is State.LEASED else None
    read = _make_reader(store, queue, state)
    async for page in browse_share(list_share, read, identity=identity):
        yield page


async def find(store: VsqsStore, name: str, ids: Sequence[str]) -> list[StoredMessage]:
    """Return messages by their ids."""
    queue = store.require(name)
    usable = [one for one in ids if (parsed := parse(one)) is not None and parsed[1] is None]

    async def find_once(wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
        for state, messages in (await list_states(store, queue, {int(one) for one in wanted})).items():
            for listed in messages:
                if (stored := _read(store, queue, state, listed, any_size=True)) is not None:
                    yield stored

    with store_errors(f"read {name}"):
        return await find_each(usable, find_once, lambda: stamp((queue.fd, queue.fail)))


async def list_states(
    store: VsqsStore, queue: QueueDirectory, wanted: Container[int] | None = None
) -> dict[State, list[ListedMessage]]:
    """List the messages by state: all of them, or those with the wanted ids.

    Raises:
        OSError: A directory cannot be listed.
    """
    now = store.options.unit.ticks(store.clock.time())
    found: dict[State, list[ListedMessage]] = {state: [] for state in State}
    with_info = {parsed[0] for name in os.listdir(queue.infos) if (parsed := parse(name)) is not None}
    for name in await list_names(queue.fd):
        parsed = parse(name)
        if parsed is None:
            continue
        number, expiry = parsed
        if wanted is not None and number not in wanted:
            continue
        info = queue.read_info(number) if number in with_info else MessageInfo()
        delayed = expiry is not None and info.due == expiry
        if expiry is None or (delayed and expiry <= now):
            found[State.READY].append((number, expiry, info))
        else:
            found[State.DELAYED if delayed else State.LEASED].append((number, expiry, info))
    for name in await list_names(queue.fail):
        if (parsed := parse(name)) is not None and parsed[1] is None and (wanted is None or parsed[0] in wanted):
            found[State.FAILED].append((parsed[0], None, queue.read_info(parsed[0])))
    return found


def file_name(listed: ListedMessage) -> str:
    """Return the name that a message's file had when it was listed."""
    number, expiry, _ = listed
    return str(number) if expiry is None else leased_name(number, expiry)


def _message_id(listed: ListedMessage) -> str:
    return str(listed[0])


def _make_reader(
    store: VsqsStore, queue: QueueDirectory, state: State
) -> Callable[[ListedMessage], StoredMessage | None]:
    return lambda listed: _read(store, queue, state, listed)


def _read(
    store: VsqsStore, queue: QueueDirectory, state: State, listed: ListedMessage, *, any_size: bool = False
) -> StoredMessage | None:
    """Read one message; return None if it is gone.

    Args:
        store: The store.
        queue: The queue.
        state: Its state.
        listed: What was listed.
        any_size: Whether to return a message whose body is larger than `max_body`. It has no body then, and an error.
            Callers of `browse` copy bodies elsewhere and remove the messages, so they must not get it.

    Raises:
        OSError: It cannot be read.
    """
    number, expiry, info = listed
    unit, most = store.options.unit, store.options.max_body
    directory = queue.fail if state is State.FAILED else None
    if most is not None:
        size = queue.read_size(file_name(listed), directory)
        if size is None and state is State.READY and expiry is not None:
            size = queue.read_size(str(number))
        if size is not None and size > most:
            return _make_stored(queue, unit, state, listed, b"", describe_too_large(size, most)) if any_size else None
    try:
        body = queue.read(file_name(listed), directory)
        if body is None and state is State.READY and expiry is not None:
            # The message was due, and has its old name again.
            body = queue.read(str(number))
    except OSError as error:
        # The failed file may not be a regular file, and is then never opened.
        if state is not State.FAILED or info.error is None:
            raise
        body, info = b"", MessageInfo(error=f"{info.error} ({error.strerror or error})", failed_at=info.failed_at)
    if body is None:
        return None
    return _make_stored(queue, unit, state, (number, expiry, info), body, info.error)


def _make_stored(
    queue: QueueDirectory,
    unit: Unit,
    state: State,
    listed: ListedMessage,
    body: bytes | OwnDescriptor,
    error: str | None,
) -> StoredMessage:
    number, expiry, info = listed
    at = None if expiry is None else unit.seconds(expiry)
    stored = StoredMessage(
        message=make_message(queue, number, body if isinstance(body, bytes) else b"", info),
        state=state,
        due_at=at if state is State.DELAYED else None,
        expires_at=at if state is State.LEASED else None,
        finished_at=info.failed_at if state is State.FAILED else None,
        error=error,
    )
    return leave_unread(stored, body)
