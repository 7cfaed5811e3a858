from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from qworker.kit.segments.format import Header, decode_header, encode_header, frame, position, salvage, scan, split
from qworker.kit.segments.state import STATE_SIZE, ChannelEntry, decode_state, encode_state
from qworker_sq.frames import FrameFile
from qworker_sq.ledger import Ledger
from qworker_sq.names import place_of_id, position_id

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def test_a_header_has_its_fields_where_the_format_says() -> None:
    data = encode_header(Header(id=7, version=1, flag=2, size=3, next_id=9))
    assert data == struct.pack("<III", 1, 2, 3) + bytes(4) + struct.pack("<QQ", 7, 9)


def test_a_record_is_its_length_its_crc_and_its_payload() -> None:
    assert frame(b"abc") == struct.pack("<II", 3, zlib.crc32(b"abc"))


def test_a_state_entry_has_its_fields_where_the_format_says() -> None:
    data = encode_state(position(5, 32), [ChannelEntry(name=b"all", place=position(6, 64), flag=1)])
    assert len(data) == STATE_SIZE == 129 * 56
    assert struct.unpack_from("<QB32s", data, 56) == (1, 3, b"all" + bytes(29))
    assert struct.unpack_from("<IQ", data, 44) == (32, 5)
    assert struct.unpack_from("<IQ", data, 56 + 44) == (64, 6)


@given(U64, U32, U32, U32, U64)
def test_headers_are_read_as_they_were_written(own: int, version: int, flag: int, size: int, following: int) -> None:
    header = Header(id=own, version=version, flag=flag, size=size, next_id=following)
    assert decode_header(encode_header(header)) == header


@given(U64, U32)
def test_positions_are_read_as_they_were_written_and_sort_as_the_log_does(segment: int, offset: int) -> None:
    place = position(segment, offset)
    assert split(place) == (segment, offset)
    assert place_of_id(position_id(place)) == place
    assert place < position(segment + 1, 0)


@given(st.text())
def test_no_text_but_a_position_is_taken_for_one(text: str) -> None:
    place = place_of_id(text)
    assert place is None or position_id(place) == text


@given(st.binary(max_size=STATE_SIZE + 100))
def test_any_bytes_are_read_as_a_state_file(data: bytes) -> None:
    _, channels = decode_state(data)
    assert all(1 <= index <= 128 and 0 < len(entry.name) <= 32 for index, entry in channels.items())


@given(st.binary(max_size=2000))
def test_any_bytes_are_scanned_and_salvaged_without_an_error(data: bytes) -> None:
    result = scan(data, 100)
    assert 0 <= result.stop <= len(data)
    found = salvage(data)
    assert found is None or found > 0


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=20), st.data())
@settings(deadline=None)
def test_a_flipped_bit_costs_its_own_record_and_no_other(payloads: list[bytes], data: st.DataObject) -> None:
    log = b"".join(frame(payload) + payload for payload in payloads)
    bit = data.draw(st.integers(0, len(log) * 8 - 1))
    damaged = bytearray(log)
    damaged[bit // 8] ^= 1 << bit % 8
    starts = [sum(8 + len(payload) for payload in payloads[:index]) for index in range(len(payloads))]
    victim = max(index for index, start in enumerate(starts) if start <= bit // 8)
    first = scan(bytes(damaged), 1000)
    assert [payload for _, payload in first.records] == payloads[:victim]
    step = salvage(bytes(damaged[first.stop :]))
    assert step is not None
    second = scan(bytes(damaged), 1000, first.stop + step)
    assert [payload for _, payload in second.records] == payloads[victim + 1 :]


def test_a_damaged_record_full_of_records_gives_no_phantom() -> None:
    inner = b"".join(frame(b"phantom %d" % n) + b"phantom %d" % n for n in range(5))
    payloads = [b"first", inner, b"last"]
    log = b"".join(frame(payload) + payload for payload in payloads)
    for bit in range(13 * 8, (13 + 8 + len(inner)) * 8):
        damaged = bytearray(log)
        damaged[bit // 8] ^= 1 << bit % 8
        step = salvage(bytes(damaged[13:]))
        assert step is not None
        assert [payload for _, payload in scan(bytes(damaged), 10, 13 + step).records] == [b"last"]


ROWS = st.lists(st.lists(st.none() | st.booleans() | st.integers(0, 2**93) | st.floats() | st.text() | st.lists(U64)))


@given(ROWS)
@example([[1, None, None, None, "0"]])
@example([[1, None, None, None, [0]]])
@settings(deadline=None)
def test_rows_that_no_qworker_wrote_break_nothing(rows: list[list[object]]) -> None:
    ledger = Ledger()
    for row in rows:
        try:
            ledger.apply(row)
        except (TypeError, ValueError, LookupError):
            # What a journal's reader reports and passes over.
            continue
    ledger.make_due(float("inf"))
    assert ledger.position() >= 0


def test_a_torn_row_is_passed_by_readers_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        rows: list[object] = []
        writer = FrameFile(folder, "journal", apply=rows.append, restart=rows.clear)
        writer.append([[1, "a"], [2, 2**90]])
        with open(tmp_path / "journal", "ab") as file:
            file.write(frame(b"[3, 4, 5]") + b"[3")
        seen: list[object] = []
        reader = FrameFile(folder, "journal", apply=seen.append, restart=seen.clear)
        reader.follow()
        assert seen == [[1, "a"], [2, 2**90]]
        writer.append([[3]])
        reader.follow()
        assert seen == rows == [[1, "a"], [2, 2**90], [3]]
        writer.close()
        reader.close()
    finally:
        os.close(folder)


def test_a_row_that_is_not_understood_is_passed_over(tmp_path: Path) -> None:
    payloads = [b"not json", b'"no list"', b"[]", b'[1, "too few"]', b"[99, 1]", b'["\xff"]', b"[" * 100_000]
    (tmp_path / "journal").write_bytes(b"".join(frame(payload) + payload for payload in payloads))
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ledger = Ledger()
        file = FrameFile(folder, "journal", apply=ledger.apply, restart=ledger.reset, snapshot=ledger.snapshot_row)
        file.follow()
        file.append([[10, 77]])
        assert ledger.cursor == 77
        file.close()
    finally:
        os.close(folder)
