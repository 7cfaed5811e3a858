"""What a look at a few messages of a large queue costs, and what moves meanwhile."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.errors import UsageError
from qworker.kit import browse as browsing
from qworker.kit import parts
from qworker.kit.browse import Chosen, Place, browse_rows, browse_share, place_of, position_of
from qworker.message import Draft, Message, Query, SettleAction, Settlement, State, StoredMessage
from qworker.testing.clock import FakeClock

MANY = 600


@pytest.fixture(params=["file", "fsq", "mq", "vsqs", "sq"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    backend = open_backend(f"{request.param}://{tmp_path / 'spool'}")
    yield backend
    await backend.aclose()


async def filled(backend: Backend) -> list[bytes]:
    bodies = [b"%04d" % number for number in range(MANY)]
    for start in range(0, MANY, 100):
        await backend.publish("q", [Draft(body=body) for body in bodies[start : start + 100]])
    return bodies


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many files were opened since the last call."""
    count = 0

    def counted(*args: Any, real: Any = os.open, **options: Any) -> int:
        nonlocal count
        count += 1
        return real(*args, **options)

    def so_far() -> int:
        nonlocal count
        before, count = count, 0
        return before

    monkeypatch.setattr(os, "open", counted)
    return so_far


async def test_a_few_of_many_messages_cost_a_few_reads(store: Backend, opened: Callable[[], int]) -> None:
    bodies = await filled(store)
    opened()
    for newest, wanted in ((False, bodies), (True, bodies[::-1])):
        found = await list_messages(store, "q", Query(State.READY, limit=20, newest=newest))
        assert [stored.message.body for stored in found] == wanted[:20]
        after = found[-1].position
        found = await list_messages(store, "q", Query(State.READY, limit=20, newest=newest, after=after))
        assert [stored.message.body for stored in found] == wanted[20:40]
        assert opened() < 100


async def test_a_limit_is_reached_although_some_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was listed and is gone when it is read makes room for others."""
    backend = open_backend(f"file://{tmp_path / 'spool'}")
    bodies = await filled(backend)
    taken = False

    def slow(*args: Any, real: Any = os.open, **options: Any) -> int:
        nonlocal taken
        if isinstance(args[0], str) and args[0].startswith("_") and not taken:
            taken = True
            folder = tmp_path / "spool" / "q" / "queue"
            for name in sorted(os.listdir(folder))[5:25]:
                (folder / name).unlink()
        return real(*args, **options)

    monkeypatch.setattr(os, "open", slow)
    try:
        found = await list_messages(backend, "q", Query(State.READY, limit=20))
        assert [stored.message.body for stored in found] == [*bodies[:5], *bodies[25:40]]
    finally:
        await backend.aclose()


async def test_what_is_due_and_moved_while_it_is_looked_at_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On `vsqs:` it gets another name, and is ready all the time."""
    clock = FakeClock()
    backend, other = (open_backend(f"vsqs://{tmp_path / 'spool'}", clock=clock) for _ in range(2))
    bodies = [b"%02d" % number for number in range(12)]
    await backend.publish("q", [Draft(body=body) for body in bodies])
    leases = await backend.lease("q", 12, 60.0)
    ends = [Settlement(lease=lease, action=SettleAction.RELEASE, delay=10.0) for lease in leases]
    assert await backend.settle(ends) == []
    clock.advance(20.0)
    try:
        pages = backend.browse("q", Query(State.READY))
        monkeypatch.setattr(browsing, "in_pages", _after(other))
        given = [stored.message.body async for page in pages for stored in page]
        assert sorted(given) == bodies
    finally:
        await backend.aclose()
        await other.aclose()


def _after(other: Backend) -> Callable[..., Any]:
    """`pages`, which first has what is due moved."""

    async def pages(found: Any) -> AsyncIterator[list[StoredMessage]]:
        assert (await other.reap("q")).returned == 12
        async for page in parts.in_pages(found):
            yield page

    return pages


def test_positions_give_back_the_place() -> None:
    for place in ((0, ""), (1.5, "_a-b.c~"), (-1, "a/b c\udcff,:"), (1 << 90, "x" * 255), (1764021234.123456789, "é")):
        position = position_of(place)
        assert position.isascii()
        assert " " not in position
        assert place_of(position) == place
    assert place_of(None) is None
    for hostile in ("", "1", ":", "x:", "nan:", "inf:", "1e999:", "1:a b", "1:\n", "1" * 50 + ":", " 1:"):
        with pytest.raises(UsageError, match="is not a valid position"):
            place_of(hostile)


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("limit", [1, 10, 9000, None])
def test_few_rows_are_held_however_many_are_added(newest: bool, limit: int | None) -> None:
    places: list[Place] = [(number * 7919 % 20_000, "") for number in range(20_000)]
    chosen = Chosen[Place](lambda place: place, (5000, ""), limit, newest=newest)
    for start in range(0, len(places), 1000):
        chosen.add(places[start : start + 1000])
        if limit is not None:
            assert len(chosen._rows) <= limit + max(limit, 4000)
    wanted = sorted(place for place in places if (place < (5000, "") if newest else place > (5000, "")))
    assert chosen.rows() == (wanted[::-1] if newest else wanted)[:limit]


class _Moving:
    """A message whose place changes when it is read, as on a store that lists the messages themselves."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.at = float(number)
        self.hidden = 0


def _read(row: _Moving) -> StoredMessage | None:
    if row.hidden:
        row.hidden -= 1
        return None
    # A worker leases it, which changes its place.
    row.at += 1000
    message = Message(id=str(row.number), queue="q", body=b"", tries=0, enqueued_at=0.0)
    return StoredMessage(message=message, state=State.READY)


def _place(row: _Moving) -> Place:
    return row.at, str(row.number)


async def test_a_message_that_moves_behind_the_end_of_a_page_is_given_once() -> None:
    rows = [_Moving(number) for number in range(6)]

    async def choose(after: Place | None, limit: int | None) -> list[_Moving]:
        chosen = Chosen(_place, after, limit, newest=False)
        chosen.add([row for row in rows if row.at < 1000])
        return chosen.rows()

    rows[0].hidden = 1
    found = [one async for page in browse_rows(Query(State.READY, limit=3), choose, _place, _read) for one in page]
    # The first could not be read, so that a second look was needed: it began behind the places of the first look.
    assert [stored.message.id for stored in found] == ["1", "2", "3"]
    assert [place_of(stored.position) for stored in found] == [(1.0, "1"), (2.0, "2"), (3.0, "3")]


@pytest.mark.parametrize("share", [False, True])
async def test_a_lease_that_is_extended_while_its_state_is_listed_is_given(share: bool) -> None:
    row = _Moving(1)
    # The listing had its former name.
    row.hidden = 1

    async def choose(*_: Any) -> list[_Moving]:
        return [row]

    def identity(one: _Moving) -> str:
        return str(one.number)

    if share:
        pages = browse_share(choose, _read, identity=identity)
    else:
        pages = browse_rows(Query(State.LEASED), choose, _place, _read, identity=identity)
    assert [stored.message.id async for page in pages for stored in page] == ["1"]
