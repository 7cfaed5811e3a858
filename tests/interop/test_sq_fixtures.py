"""Topics that the released sq library wrote, and ours read by an independent decoder of the format."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from tests.support.archives import unpack

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sq.tar.gz"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    unpack(FIXTURE, tmp_path)
    return tmp_path / "sq"


def decode_segment(path: Path) -> tuple[dict[str, int], list[tuple[int, bytes]]]:
    data = path.read_bytes()
    names = ("version", "flag", "size", "id", "next_id")
    header = dict(zip(names, struct.unpack_from("<III4xQQ", data), strict=True))
    records: list[tuple[int, bytes]] = []
    offset = 32
    while offset + 8 <= len(data):
        length, crc = struct.unpack_from("<II", data, offset)
        if length == 0:
            break
        payload = data[offset + 8 : offset + 8 + length]
        assert zlib.crc32(payload) == crc
        records.append((offset, payload))
        offset += 8 + length
    return header, records


def decode_entries(topic: Path) -> dict[str, tuple[int, int]]:
    data = (topic / "state").read_bytes()
    assert len(data) == 129 * 56
    entries: dict[str, tuple[int, int]] = {}
    for index in range(129):
        _, length, name, offset, segment = struct.unpack_from("<QB32s3xIQ", data, index * 56)
        if index == 0 or length:
            entries[name[:length].decode()] = (segment, offset)
    return entries


@pytest.mark.parametrize(("channel", "first"), [("idle", 0), ("half", 50), ("all", 100)])
async def test_a_channel_of_the_released_library_goes_on_where_it_stood(root: Path, channel: str, first: int) -> None:
    backend = open_backend(f"sq://{root}?channel={channel}")
    try:
        assert await backend.queues() == ["fresh", "rolled", "users"]
        assert (await backend.stats("users")).ready == 100 - first
        leases = await backend.lease("users", 1000, 60.0)
        assert [lease.message.body for lease in leases] == [b'{"user": %d}' % n for n in range(first, 100)]
        assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    finally:
        await backend.aclose()
    entries = decode_entries(root / "users")
    assert entries[channel] == entries[""] == (1795249163666881954, 2022)


async def test_a_look_changes_no_byte_of_what_the_library_wrote(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    backend = open_backend(f"sq://{root}?channel=half")
    try:
        assert (await backend.stats("users")).ready == 50
        assert await backend.lease("fresh", 10, 60.0) == []
    finally:
        await backend.aclose()
    assert {path: path.read_bytes() for path in before} == before


async def test_records_are_appended_bit_for_bit_behind_those_of_the_library(root: Path) -> None:
    backend = open_backend(f"sq://{root}?channel=all")
    try:
        await backend.publish("users", [Draft(body=b'{"user": 100}'), Draft(body=b'{"user": 101}')])
    finally:
        await backend.aclose()
    (segment,) = (root / "users").glob("*.q")
    header, records = decode_segment(segment)
    assert header == {"version": 0, "flag": 0, "size": 0, "id": 1795249163666881954, "next_id": 0}
    assert [payload for _, payload in records] == [b'{"user": %d}' % n for n in range(102)]
    assert segment.stat().st_size == 65536
    assert decode_entries(root / "users")[""] == (1795249163666881954, records[-1][0] + 8 + len(records[-1][1]))


async def test_a_full_segment_of_the_library_is_rolled_over(root: Path) -> None:
    backend = open_backend(f"sq://{root}?channel=keeper")
    try:
        await backend.publish("rolled", [Draft(body=b"x" * 1000)])
        leases = await backend.lease("rolled", 100, 60.0)
        assert [lease.message.body for lease in leases] == [bytes([n]) * 1000 for n in range(16)] + [b"x" * 1000]
    finally:
        await backend.aclose()
    old, new = sorted((root / "rolled").glob("*.q"))
    header, _ = decode_segment(old)
    assert (header["size"], header["next_id"]) == (16160, int(new.stem))
    assert decode_segment(new) == (
        {"version": 0, "flag": 0, "size": 0, "id": int(new.stem), "next_id": 0},
        [(32, b"x" * 1000)],
    )
    assert new.stat().st_size == 16384


async def test_a_new_topic_looks_like_one_of_the_library(root: Path) -> None:
    backend = open_backend(f"sq://{root}?channel=mine&segment_size=16384")
    try:
        await backend.create("made")
    finally:
        await backend.aclose()
    (segment,) = (root / "made").glob("*.q")
    assert decode_entries(root / "made") == {"": (int(segment.stem), 32), "mine": (int(segment.stem), 32)}
    reference = next((root / "fresh").glob("*.q")).read_bytes()
    assert segment.read_bytes() == reference[:16] + struct.pack("<Q", int(segment.stem)) + reference[24:]
