"""C16: every backend does what the memory backend does, whatever happens in whatever order."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.message import SettleAction, Settlement
from qworker.testing.clock import FakeClock
from qworker.testing.harness import Harness
from qworker_memory import MemoryBackend
from tests.property.lifecycle import SETTINGS, check_lifecycle
from tests.support.servers import MovedClock, RedisHarness, RedisServer, free_port
from tests.support.serving import served

pytestmark = pytest.mark.timeout(300)


def test_two_memory_stores_agree() -> None:
    check_lifecycle(lambda: Harness.fake(f"memory://lifecycle-{secrets.token_hex(8)}"))


@pytest.mark.parametrize("url", ["file://{}?sync=off", "fsq://{}?sync=off", "vsqs://{}", "mq://{}?sync=off"])
def test_a_directory_does_as_the_model(url: str, tmp_path: Path) -> None:
    check_lifecycle(lambda: Harness.fake(url.format(tmp_path / secrets.token_hex(8))))


def test_a_log_of_which_one_process_leases_does_as_the_model(tmp_path: Path) -> None:
    check_lifecycle(lambda: Harness.fake(f"sq://{tmp_path}/{secrets.token_hex(8)}?sync=off"), alone=True)


def test_redis_does_as_the_model() -> None:
    with RedisServer(stopped_clock=True) as server:
        check_lifecycle(lambda: RedisHarness(emptied(server)))


def test_rfq_does_as_the_model() -> None:
    with RedisServer(port=free_port(), stopped_clock=True) as server:
        clock, url = MovedClock(), f"rfq://127.0.0.1:{server.port}/0"
        check_lifecycle(lambda: RedisHarness(emptied(server), url=url, moved=clock))


def test_a_store_behind_a_server_does_as_the_model() -> None:
    clock = FakeClock()
    store = open_backend(f"memory://lifecycle-{secrets.token_hex(8)}", clock=clock)
    with served(store, reaps=False, body_limit=1 << 20) as server:
        check_lifecycle(lambda: Harness(f"mq+http://127.0.0.1:{server.port}", clock=clock))


def emptied(server: RedisServer) -> RedisServer:
    """The same server for every example."""
    with server.client() as client:
        client.flushall()
    return server


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
