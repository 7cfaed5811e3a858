"""Every truncation and bit flip of a 64 KiB segment: all intact records come back, and none that nobody wrote."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from qworker.clock import SYSTEM_CLOCK
from qworker.kit.segments.format import HEADER_SIZE, Header, encode_header, frame, position
from qworker.kit.segments.log import Damaged, Log
from qworker.kit.segments.state import StateFile, encode_state

SEGMENT, SIZE = 1_795_249_163_666_881_954, 65536
_random = random.Random(20261122)
PAYLOADS = [
    (b'{"user": %d}' % n if n % 3 else _random.randbytes(_random.randrange(1, 900))) + b"\0" * (n % 5)
    for n in range(320)
]
STARTS = [HEADER_SIZE + sum(8 + len(payload) for payload in PAYLOADS[:n]) for n in range(len(PAYLOADS) + 1)]
END = STARTS[-1]
WHOLE = (encode_header(Header(id=SEGMENT)) + b"".join(frame(p) + p for p in PAYLOADS)).ljust(SIZE, b"\0")


class Damaging:
    """A topic's directory whose one segment is written anew for each case."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{SEGMENT}.q"
        self.folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        (folder / "state").write_bytes(encode_state(0, []))
        self.state = StateFile(os.open(folder / "state", os.O_RDWR))

    def close(self) -> None:
        os.close(self.folder)
        os.close(self.state.fd)

    def intact(self, data: bytes, recorded: int) -> list[bytes]:
        """What a reader gets after a recovery, as after a crash."""
        self.path.write_bytes(data)
        log = Log(self.folder, self.state, SYSTEM_CLOCK, None)
        try:
            end = log.recover(position(SEGMENT, recorded), whole=True)
            found, _ = log.read(position(SEGMENT, HEADER_SIZE), 10_000, end)
            return [payload for _, payload in found if not isinstance(payload, Damaged)]
        finally:
            log.close()


@pytest.fixture
def damaging(tmp_path: Path) -> Iterator[Damaging]:
    damaging = Damaging(tmp_path)
    yield damaging
    damaging.close()


def test_the_segment_is_filled(damaging: Damaging) -> None:
    assert SIZE // 2 < END < SIZE
    assert damaging.intact(WHOLE, END) == PAYLOADS
    assert damaging.intact(WHOLE, HEADER_SIZE) == PAYLOADS


@pytest.mark.parametrize("recorded", [END, HEADER_SIZE])
def test_of_a_truncated_segment_every_whole_record_comes_back(damaging: Damaging, recorded: int) -> None:
    cuts = {*STARTS, *(start + more for start in STARTS[::7] for more in (-1, 1, 4, 7, 8, 9)), *range(40)}
    cuts |= set(_random.sample(range(SIZE), 120))
    for cut in sorted(cut for cut in cuts if 0 <= cut <= SIZE):
        whole = sum(start <= cut for start in STARTS[1:])
        # A payload that ends in zeros may be whole again when the file gets its size back.
        found = damaging.intact(WHOLE[:cut], recorded)
        assert found[:whole] == PAYLOADS[:whole], cut
        assert found == PAYLOADS[: len(found)], cut


@pytest.mark.parametrize("recorded", [END, HEADER_SIZE])
def test_of_a_segment_with_a_zeroed_tail_every_whole_record_comes_back(damaging: Damaging, recorded: int) -> None:
    for cut in _random.sample(range(HEADER_SIZE, END), 120):
        whole = sum(start <= cut for start in STARTS[1:])
        found = damaging.intact(WHOLE[:cut].ljust(SIZE, b"\0"), recorded)
        assert found[:whole] == PAYLOADS[:whole], cut
        assert found == PAYLOADS[: len(found)], cut


@pytest.mark.parametrize("recorded", [END, HEADER_SIZE])
def test_a_flipped_bit_costs_one_record_at_most(damaging: Damaging, recorded: int) -> None:
    bits = set(range(0, HEADER_SIZE * 8, 3)) | set(_random.sample(range(SIZE * 8), 300))
    bits |= {start * 8 + bit for start in _random.sample(STARTS[:-1], 5) for bit in range(64)}
    for bit in sorted(bits):
        data = bytearray(WHOLE)
        data[bit // 8] ^= 1 << bit % 8
        victim = next((n for n in range(len(PAYLOADS)) if STARTS[n] <= bit // 8 < STARTS[n + 1]), None)
        expected = [payload for n, payload in enumerate(PAYLOADS) if n != victim]
        assert damaging.intact(bytes(data), recorded) == expected, bit
