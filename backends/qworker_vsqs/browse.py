"""What people do with a queue: look at it, remove, requeue. Syncs are the caller's."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator

from qworker.kit.browse import Place
from qworker.kit.files import list_names
from qworker.message import FinishedMessage, State, StoredMessage
from qworker_vsqs.lease import make_message
from qworker_vsqs.names import Unit, leased_name, parse
from qworker_vsqs.queue_dir import Folder, Note

__all__ = ["Row", "id_of", "look", "place", "requeue", "stored", "unchanged", "unlink"]

# Id, expiry in ticks, note.
Row = tuple[int, int | None, Note]


async def look(folder: Folder, now: int, wanted: Container[int] | None = None) -> dict[State, list[Row]]:
    """Everything stored, or what is wanted of it by its number, by state; `now` is in ticks.

    Raises:
        OSError: a directory cannot be listed.
    """
    found: dict[State, list[Row]] = {state: [] for state in State}
    noted = {parsed[0] for name in os.listdir(folder.notes) if (parsed := parse(name)) is not None}
    for name in await list_names(folder.fd):
        parsed = parse(name)
        if parsed is None:
            continue
        number, expiry = parsed
        if wanted is not None and number not in wanted:
            continue
        note = folder.note(number) if number in noted else Note()
        delayed = expiry is not None and note.due == expiry
        if expiry is None or (delayed and expiry <= now):
            found[State.READY].append((number, expiry, note))
        else:
            found[State.DELAYED if delayed else State.LEASED].append((number, expiry, note))
    for name in await list_names(folder.fail):
        if (parsed := parse(name)) is not None and parsed[1] is None and (wanted is None or parsed[0] in wanted):
            found[State.FAILED].append((parsed[0], None, folder.note(parsed[0])))
    return found


def id_of(row: Row) -> str:
    """The id of a row's message."""
    return str(row[0])


def place(state: State, row: Row) -> Place:
    """Where a row stands in the order of its state."""
    number, expiry, note = row
    if state is State.READY:
        return number, ""
    return (note.failed_at or 0.0) if state is State.FAILED else (expiry or 0), f"{number:020}"


def stored(folder: Folder, unit: Unit, state: State, row: Row) -> StoredMessage | None:
    """Read one message; None when it is gone.

    Raises:
        OSError: it cannot be read.
    """
    number, expiry, note = row
    try:
        body = folder.read(_name(row), folder.fail if state is State.FAILED else None)
        if body is None and state is State.READY and expiry is not None:
            # It was due, and has got its old name back.
            body = folder.read(str(number))
    except OSError as error:
        # What was set aside is no file that may be opened.
        if state is not State.FAILED or note.error is None:
            raise
        body, note = b"", Note(error=f"{note.error} ({error.strerror or error})", failed_at=note.failed_at)
    if body is None:
        return None
    at = None if expiry is None else unit.seconds(expiry)
    return StoredMessage(
        message=make_message(folder, number, body, note),
        state=state,
        due_at=at if state is State.DELAYED else None,
        expires_at=at if state is State.LEASED else None,
        finished_at=note.failed_at if state is State.FAILED else None,
        error=note.error,
    )


def _name(row: Row) -> str:
    number, expiry, _ = row
    return str(number) if expiry is None else leased_name(number, expiry)


def unchanged(folder: Folder, found: Iterable[FinishedMessage]) -> Iterator[tuple[State, Row]]:
    """Yield failed messages that are as they were found; each is checked when it is asked for."""
    for one in found:
        parsed = parse(one.id)
        if one.state is not State.FAILED or parsed is None or parsed[1] is not None:
            continue
        note = folder.note(parsed[0])
        if one.has_finished_at(note.failed_at):
            # In fail/ alone: what was requeued since is not there.
            yield State.FAILED, (parsed[0], None, note)


def unlink(folder: Folder, rows: Iterable[tuple[State, Row]]) -> int:
    """Delete messages, those that are still where they were seen; how many."""
    count = 0
    for state, row in rows:
        try:
            os.unlink(_name(row), dir_fd=folder.fail if state is State.FAILED else folder.fd)
        except FileNotFoundError:
            continue
        folder.drop_note(row[0])
        count += 1
    return count


def requeue(folder: Folder, failed: Iterable[tuple[State, Row]]) -> list[int]:
    """Make failed messages ready, under the folder's lock; return their open notes, which are to be synced."""
    files: list[int] = []
    for _, (number, _, _) in failed:
        if not _is_failed(folder, number):
            # Another requeue was faster: the note is that of a live message.
            continue
        before = folder.note(number)
        files.append(folder.write_note(number, Note(enqueued_at=before.enqueued_at, origin=before.origin)))
        os.rename(str(number), str(number), src_dir_fd=folder.fail, dst_dir_fd=folder.fd)
        folder.window.came(str(number))
    return files


def _is_failed(folder: Folder, number: int) -> bool:
    try:
        os.stat(str(number), dir_fd=folder.fail, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
