from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.offers import follower_of
from qworker.backend.registry import open_backend
from qworker.message import Draft, Query, State
from qworker.url import BackendURL
from qworker_sq import SqBackend
from qworker_sq.follow import SqFollower

QUEUE = "log"


@asynccontextmanager
async def opened(folder: Path, channel: str = "spark", **options: object) -> AsyncIterator[tuple[Backend, SqFollower]]:
    more = "".join(f"&{name}={value}" for name, value in options.items())
    url = f"sq://{folder}?channel={channel}&sync=off{more}"
    backend = open_backend(url)
    follower = SqFollower(BackendURL.parse(url), QUEUE)
    await follower.open()
    try:
        yield backend, follower
    finally:
        await follower.aclose()
        await backend.aclose()


async def publish(backend: Backend, *bodies: bytes) -> None:
    await backend.publish(QUEUE, [Draft(body=body) for body in bodies])


async def read(follower: SqFollower, start: str, end: str, wanted: int = 3) -> list[bytes]:
    return [
        stored.message.body
        for part in await follower.divide(start, end, wanted)
        async for page in follower.read(part)
        for stored in page
    ]


def test_the_scheme_has_a_follower() -> None:
    assert follower_of("sq") is SqBackend
    assert isinstance(SqBackend.follower(BackendURL.parse("sq:///nowhere"), QUEUE), SqFollower)
    assert follower_of("file") is None


async def test_a_stretch_is_the_same_until_it_is_committed(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, follower):
        begin = await follower.begin("channel")
        await publish(backend, b"1", b"2", b"3")
        end = await follower.end()
        await publish(backend, b"4")
        for _ in range(2):
            assert await read(follower, begin, end) == [b"1", b"2", b"3"]
        await follower.commit(end)
        assert await follower.begin("channel") == end
        assert await read(follower, end, await follower.end()) == [b"4"]
        assert [stored.message.body for stored in await list_messages(backend, QUEUE, Query(State.READY))] == [b"4"]


async def test_positions_ahead_are_those_of_so_many_messages(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, follower):
        begin = await follower.begin("earliest")
        await publish(backend, *[b"%d" % number for number in range(10)])
        end = await follower.end()
        middle = await follower.ahead(begin, 4, end)
        assert await read(follower, begin, middle) == [b"0", b"1", b"2", b"3"]
        assert await follower.ahead(middle, 100, end) == end
        assert await follower.ahead(end, 100, end) == end
        assert await follower.begin("latest") == end


@pytest.mark.parametrize("wanted", [1, 2, 7, 40])
async def test_stretches_hold_each_record_of_many_segments_once(tmp_path: Path, wanted: int) -> None:
    async with opened(tmp_path, segment_size=1 << 20) as (backend, follower):
        begin = await follower.begin("channel")
        bodies = [b"%06d" % number + b"x" * (number * 5 % 7000) for number in range(1500)]
        for first in range(0, len(bodies), 100):
            await publish(backend, *bodies[first : first + 100])
        end = await follower.end()
        parts = await follower.divide(begin, end, wanted)
        assert min(wanted, 5) - 1 <= len(parts) <= wanted + 1
        assert await read(follower, begin, end, wanted) == bodies


async def test_the_log_is_kept_from_where_the_channel_stands(tmp_path: Path) -> None:
    async with opened(tmp_path, segment_size=1 << 12) as (backend, follower):
        begin = await follower.begin("channel")
        for number in range(20):
            await publish(backend, b"%d" % number * 1000)
        before = len(list((tmp_path / QUEUE).glob("*.q")))
        end = await follower.end()
        assert len(await read(follower, begin, end)) == 20
        assert len(list((tmp_path / QUEUE).glob("*.q"))) == before > 3
        await follower.commit(end)
    assert len(list((tmp_path / QUEUE).glob("*.q"))) < before


async def test_a_damaged_record_is_passed_over_and_kept_with_the_failed_ones(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, follower):
        begin = await follower.begin("channel")
        await publish(backend, b"first", b"second", b"third")
        end = await follower.end()
    (segment,) = (tmp_path / QUEUE).glob("*.q")
    with segment.open("r+b") as file:
        data = file.read()
        file.seek(data.index(b"second"))
        file.write(b"sECond")
    async with opened(tmp_path) as (backend, follower):
        assert await read(follower, begin, end) == [b"first", b"third"]
        await follower.commit(end)
        (failed,) = await list_messages(backend, QUEUE, Query(State.FAILED))
        assert b"sECond" in failed.message.body
        assert failed.error is not None
        assert "damaged" in failed.error


async def test_another_channel_is_not_touched(tmp_path: Path) -> None:
    async with opened(tmp_path, "workers") as (workers, _), opened(tmp_path) as (_, follower):
        await publish(workers, b"1", b"2")
        await follower.commit(await follower.end())
        assert len(await workers.lease(QUEUE, 10, 60.0)) == 2
