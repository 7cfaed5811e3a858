from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.fsq_peer import install_fsq


@pytest.fixture(scope="session")
def fsq() -> tuple[str, Path]:
    """A Python 2.7 and the folder that has fsq 0.2.5."""
    return install_fsq()
