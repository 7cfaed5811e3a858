"""`Idempotency-Key`: one message for each key, also after a restart and after its queue was deleted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from tests.support.servers import RedisServer, free_port
from tests.support.serving import Response, ask, served

# Returns the URL of an empty store by its scheme.
Stores = Callable[[str], str]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with RedisServer(port=free_port()) as redis:
        yield (
            lambda scheme: f"redis://127.0.0.1:{redis.port}/0" if scheme == "redis" else f"{scheme}://{tmp_path}/spool"
        )


@pytest.mark.parametrize("store", ["file", "mq", "redis"])
def test_a_key_that_was_used_with_another_body_is_refused_after_a_restart_too(store: str, stores: Stores) -> None:
    answers: list[Response] = []
    for body in (b"x", b"other", b"x"):
        with served(open_backend(stores(store), remote_leases=True)) as server:
            answers.append(ask(server, "POST", "/q/messages", body, Idempotency_Key="k"))
    assert [status for status, _, _ in answers] == [201, 422, 201]
    assert answers[0][1]["X-Message-Id"] == answers[2][1]["X-Message-Id"]
    assert b"different body" in answers[1][2]
    with served(open_backend(stores(store), remote_leases=True)) as server:
        assert ask(server, "GET", "/q/messages")[2] == b"x"
        assert ask(server, "GET", "/q/messages")[0] == 204


@pytest.mark.parametrize("store", ["file", "mq", "redis"])
@pytest.mark.parametrize("through_the_server", [True, False])
def test_a_remembered_key_stores_again_after_its_queue_was_deleted(
    store: str, stores: Stores, through_the_server: bool
) -> None:
    url = stores(store)

    async def delete() -> None:
        other = open_backend(url)
        await other.delete("q")
        await other.aclose()

    with served(open_backend(url, remote_leases=True)) as server:
        for body in (b"x", b"other"):
            assert ask(server, "POST", "/q/messages", body, Idempotency_Key="k")[0] == 201
            assert ask(server, "GET", "/q/messages")[2] == body
            if through_the_server:
                assert ask(server, "DELETE", "/q")[0] == 200
                # It exists again.
                assert ask(server, "PUT", "/q")[0] == 201
            else:
                asyncio.run(delete())


def test_a_key_costs_the_same_however_many_messages_wait(tmp_path: Path) -> None:
    listed: list[object] = []
    # A hook cannot be removed.
    watched = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watched and event in {"os.listdir", "os.scandir"}:
            listed.append(arguments)

    with served(open_backend(f"file://{tmp_path}/spool", remote_leases=True), reaps=False) as server:
        for number in range(30):
            assert ask(server, "POST", "/q/messages", b"%d" % number)[0] == 201
        sys.addaudithook(hook)
        for body, status in ((b"x", 201), (b"x", 201), (b"y", 422)):
            assert ask(server, "POST", "/q/messages", body, Idempotency_Key="k")[0] == status
    with served(open_backend(f"file://{tmp_path}/spool", remote_leases=True), reaps=False) as server:
        for body, status in ((b"y", 422), (b"x", 201)):
            assert ask(server, "POST", "/q/messages", body, Idempotency_Key="k")[0] == status
    watched.clear()
    assert listed == []
