"""What the fault tests share: the shim, and launchers that run programs under it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.fault.harness import Launcher, build_shim
from tests.fault.loops import LOOPS


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give all loops to the tests that are marked for several, and asyncio's own to all others."""
    marker = item.get_closest_marker("asyncio")
    return LOOPS if marker is not None and marker.kwargs else {"asyncio": asyncio.new_event_loop}


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
