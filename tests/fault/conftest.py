"""What the fault tests share: the shim, and launchers that run programs under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.harness import Launcher, build_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def launcher(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(shim, tmp_path_factory.mktemp("launcher") / "errors")
    try:
        yield launcher
    finally:
        launcher.close()
