"""A real browser, without a window: what it makes of a page, and how that looks."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 120.0


def _browse(folder: Path, page: Path | str, *options: str) -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, f"no browser: install one of {', '.join(NAMES)} (tests/install-tools.sh does)"
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1200,1500", *options]
    command.append(page if isinstance(page, str) else page.as_uri())
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return done.stdout


def document(folder: Path, page: Path | str) -> str:
    """The document of a file or a URL as the browser has it after everything in it has run."""
    return _browse(folder, page, "--virtual-time-budget=5000", "--dump-dom")


def colours(folder: Path, page: Path) -> Counter[tuple[int, int, int]]:
    """How many pixels of which colour the page shows."""
    shot = folder / "shot.png"
    _browse(folder, page, f"--screenshot={shot}")
    return Counter(_pixels(shot.read_bytes()))


def _pixels(png: bytes) -> list[tuple[int, int, int]]:
    """The pixels of a PNG of 8 bits a channel that is not interlaced."""
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[kind]
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(data), width * channels
    before = bytearray(stride)
    found: list[tuple[int, int, int]] = []
    for y in range(height):
        start = y * (stride + 1)
        before = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, channels)
        found += [(before[x], before[x + 1], before[x + 2]) for x in range(0, stride, channels)]
    return found


def _unfiltered(kind: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    if kind == 0:
        return line
    for i in range(len(line)):
        left = line[i - channels] if i >= channels else 0
        corner = above[i - channels] if i >= channels else 0
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = above[i]
        elif kind == 3:
            guess = (left + above[i]) // 2
        else:
            guess = min((left, above[i], corner), key=lambda c: abs(left + above[i] - corner - c))
        line[i] = (line[i] + guess) & 0xFF
    return line
