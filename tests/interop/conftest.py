from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fsq_release import install_fsq, interpreters


@pytest.fixture(scope="session", params=interpreters())
def fsq(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """A Python and the folder that has fsq 0.2.5 for it."""
    return install_fsq(request.param)
