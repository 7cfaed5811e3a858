from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from qworker.kit.directory.reasons import read_reason, write_reason


@pytest.fixture
def fail(tmp_path: Path):
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("reason", ["", "no such file\n", "\udc80 of no encoding"])
def test_a_reason_is_read_as_it_was_written(fail, reason):
    os.close(write_reason(fail, ".a.reason", reason, mode=0o600))
    assert read_reason(fail, ".a.reason") == reason
    assert read_reason(fail, ".b.reason") is None


def test_a_strangers_reason_of_no_encoding_is_shown_all_the_same(fail, tmp_path):
    (tmp_path / ".a.reason").write_bytes(b"caf\xe9")
    assert read_reason(fail, ".a.reason") == "caf\ufffd"


def test_a_reason_that_does_not_fit_leaves_nothing(fail, tmp_path):
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_reason(fail, ".a.reason", "too long", mode=0o600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
