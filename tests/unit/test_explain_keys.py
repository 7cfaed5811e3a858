"""What `explain` says about the unique key of a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft, SettleAction, Settlement
from qworker.tools.explain import explain
from qworker.unique import Unique
from tests.support.servers import RedisServer

REPLACE = Unique(again="replace")
STARTED = Unique(until="started")


async def check(url: str) -> None:
    backend = open_backend(url)

    async def said(message_id: str) -> list[str]:
        return [reason.text for reason in (await explain(backend, "q", message_id)).reasons if reason.code == "unique"]

    await backend.publish("q", [Draft(body=b"", id="old", unique_key="k", unique=REPLACE)])
    assert await said("old") == ["it holds unique key k until done"]
    (lease,) = await backend.lease("q", 1, 60.0)
    await backend.publish("q", [Draft(body=b"", id="new", unique_key="k", unique=REPLACE)])
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP, delay=100.0)])
    # The newer one has its key while the older one waits for its retry.
    assert (await said("old"), await said("new")) == ([], ["it holds unique key k until done"])
    await backend.publish("q", [Draft(body=b"", id="begun", unique_key="s", unique=STARTED, priority=9)])
    assert await said("begun") == ["it holds unique key s until it starts"]
    (lease,) = await backend.lease("q", 1, 60.0)
    await backend.settle([Settlement(lease=lease, action=SettleAction.RELEASE)])
    assert await said("begun") == []
    await backend.delete("q")
    await backend.aclose()


@pytest.mark.parametrize("scheme", ["memory", "file", "redis"])
async def test_only_the_message_that_has_a_key_is_said_to_hold_it(scheme: str, tmp_path: Path) -> None:
    if scheme != "redis":
        await check("memory://explain-keys" if scheme == "memory" else f"file://{tmp_path}/spool?sync=off")
        return
    with RedisServer() as server:
        await check(server.url)
