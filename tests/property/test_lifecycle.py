"""Every backend does what the memory backend does, whatever happens in whatever order."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from qworker.backend import Backend
from qworker.message import SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker.testing.harness import Harness
from qworker_memory import MemoryBackend
from tests.property.lifecycle import SETTINGS, check_lifecycle

pytestmark = pytest.mark.timeout(300)


def test_two_memory_stores_agree() -> None:
    check_lifecycle(
        lambda: Harness.fake(f"memory://lifecycle-{secrets.token_hex(8)}"), settings(SETTINGS, max_examples=20)
    )


def test_the_file_backend_does_as_the_model(tmp_path: Path) -> None:
    check_lifecycle(lambda: Harness.fake(f"file://{tmp_path}/{secrets.token_hex(8)}?sync=off"))


class Forgetful(MemoryBackend):
    """Gives what a stale holder releases to another, as backends without tokens do."""

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settlement]:
        refused = await super().settle(settlements)
        return [settlement for settlement in refused if settlement.action is not SettleAction.RELEASE]


class ForgetfulHarness(Harness):
    def make(self, *, remote_leases: bool = False) -> Backend:
        return Forgetful(self.url, clock=self.clock or FakeClock())


def test_the_comparison_finds_a_backend_that_forgets_a_token() -> None:
    how = settings(SETTINGS, phases=[Phase.generate], max_examples=300)
    with pytest.raises(AssertionError):
        check_lifecycle(lambda: ForgetfulHarness.fake(secrets.token_hex(8)), how)
