"""Users and passwords that a provider gives: for each new connection, and while they change under load."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.credentials import CredentialProvider

from qworker import Tasks
from qworker.backend import Backend
from qworker.backend.registry import open_backend
from qworker.errors import InvalidURL, PermissionDenied
from qworker.message import Draft, SettleAction, Settlement
from qworker.testing.wait_until import wait_until
from tests.fault.loops import both_loops
from tests.fault.redis_load import APP, under_load
from tests.support.servers import RedisServer, free_port
from tests.support.topologies import cluster, command, watched

pytestmark = pytest.mark.fault

QUEUE = "work"
LONG = 1000.0


class Login:
    """The user of the tests on some servers, and the password that it has now."""

    def __init__(self, *servers: RedisServer) -> None:
        self._servers = servers
        self.password = "first/password"
        self.asked = 0
        self._set()

    def _set(self) -> None:
        for server in self._servers:
            command(server, "ACL", "SETUSER", "worker", "on", "resetpass", f">{self.password}", "~*", "&*", "+@all")

    def rotate(self, password: str) -> None:
        """Change the password, and end all connections that have logged in with the old one."""
        self.password = password
        self._set()
        self.end_connections()

    def end_connections(self) -> None:
        for server in self._servers:
            command(server, "CLIENT", "KILL", "USER", "worker")

    def give(self) -> tuple[str, str]:
        self.asked += 1
        return "worker", self.password

    async def give_later(self) -> tuple[str, str]:
        await asyncio.sleep(0)
        return self.give()

    def connected(self) -> set[str]:
        """Return the users of all connections but the tests' own, which go through the socket."""
        found = set()
        for server in self._servers:
            with server.client() as client:
                found |= {each["user"] for each in client.client_list(_type="normal") if ":0" not in each["addr"]}
        return found

    def is_alone(self) -> bool:
        """Return whether all connections have logged in: until then a new one is that of the default user."""
        return self.connected() == {"worker"}


class Provider(CredentialProvider):
    """A provider of redis-py."""

    def __init__(self, login: Login) -> None:
        self._login = login

    def get_credentials(self) -> tuple[str, str]:
        return self._login.give()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(port=free_port()) as server:
        yield server


async def work(backend: Backend, queue: str = QUEUE) -> None:
    """Use each kind of connection: for calls, for blocking reads, and for threads."""
    await backend.publish(queue, [Draft(body=b"x")])
    leases = await backend.lease(queue, 1, LONG)
    assert [lease.message.body for lease in leases] == [b"x"]
    assert await asyncio.to_thread(backend.extend, leases, LONG) == []
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    assert await backend.lease(queue, 1, LONG, 0.05) == []
    await backend.wait([queue], 0.05)


# -- what gives credentials --------------------------------------------------------------------------------------------


@both_loops
@pytest.mark.parametrize("scheme", ["redis", "rfq"])
@pytest.mark.parametrize(
    "provider",
    [
        pytest.param(lambda login: login.give, id="function"),
        pytest.param(lambda login: login.give_later, id="async function"),
        pytest.param(Provider, id="provider"),
    ],
)
async def test_a_provider_gives_the_login_of_each_new_connection(
    server: RedisServer, scheme: str, provider: Callable[[Login], Any]
) -> None:
    login = Login(server)
    backend = open_backend(f"{scheme}://127.0.0.1:{server.port}/0", credential_provider=provider(login))
    await work(backend)
    assert login.connected() == {"worker"}
    for password in ("second", "third"):
        before = login.asked
        login.rotate(password)
        await work(backend)
        assert login.asked > before
    await backend.aclose()


async def test_a_password_alone_is_that_of_the_default_user() -> None:
    with RedisServer(port=free_port(), requirepass="right") as server:
        backend = open_backend(server.tcp_url, credential_provider=lambda: "right")
        await work(backend)
        await backend.aclose()


async def test_an_app_takes_a_provider(server: RedisServer) -> None:
    login = Login(server)
    tasks = Tasks(server.tcp_url, credential_provider=login.give)

    @tasks.task
    async def noop() -> None:
        """Do nothing."""

    await noop.enqueue()
    login.rotate("second")
    await noop.enqueue()
    assert login.connected() == {"worker"}
    await tasks.aclose()


PROVIDERS = """
from redis.credentials import CredentialProvider

def function():
    return "worker", "first/password"

async def later():
    return "worker", "first/password"

class Provider(CredentialProvider):
    def get_credentials(self):
        return function()

instance = Provider()
"""


@pytest.mark.parametrize("name", ["function", "later", "Provider", "instance"])
async def test_a_url_names_a_provider_in_a_module_of_the_current_folder(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "logins.py").write_text(PROVIDERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "logins", raising=False)
    login = Login(server)
    backend = open_backend(f"{server.tcp_url}?credential_provider=logins:{name}")
    await work(backend)
    assert login.connected() == {"worker"}
    await backend.aclose()
    monkeypatch.delitem(sys.modules, "logins")


async def test_a_primary_that_sentinels_name_and_the_nodes_of_a_cluster_ask_the_provider() -> None:
    with watched(replicas=0, sentinels=1) as group, cluster() as formed:
        login = Login(group.primary, *formed.nodes)
        for url, queues in (
            (group.url(), [QUEUE]),
            (formed.url(), [name for number in range(3) for name in formed.queues_of(number, 1)]),
        ):
            backend = open_backend(url, credential_provider=login.give)
            for queue in queues:
                await work(backend, queue)
            login.rotate(f"{login.password}+")
            for queue in queues:
                await work(backend, queue)
            await backend.aclose()
        assert login.asked > 8


# -- rotation under load -----------------------------------------------------------------------------------------------

LOGIN = """
from pathlib import Path

def login():
    return "worker", Path("password").read_text()
"""
APP_WITH_PROVIDER = APP.replace("Tasks()", "Tasks(credential_provider=login)").replace(
    "import os, time", "import os, time\nfrom logins import login"
)


@pytest.mark.parametrize("place", ["app", "url"])
async def test_a_password_that_changes_under_load_stops_no_worker(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    login = Login(server)
    (tmp_path / "password").write_text(login.password)
    (tmp_path / "logins.py").write_text(LOGIN)
    url = server.tcp_url if place == "app" else f"{server.tcp_url}?credential_provider=logins:login"
    app = APP_WITH_PROVIDER if place == "app" else APP
    assert app.count("logins") == (place == "app")
    # Publishers are in this process, and use the default user.
    async with under_load(tmp_path, server.url, worker_url=url, app=app) as (load, process):
        await load.goes_on()
        await wait_until(login.is_alone)
        for password in ("second", "third", "fourth"):
            # Both passwords are valid until the new one is known everywhere.
            command(server, "ACL", "SETUSER", "worker", f">{password}")
            (tmp_path / "password").write_text(password)
            login.rotate(password)
            await load.goes_on()
            await wait_until(login.is_alone)
        assert not process.events("worker_stopped")
        await load.finish()


# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_a_wrong_password_of_a_provider_is_one_line_and_the_right_one_is_asked_for_later(
    server: RedisServer,
) -> None:
    login = Login(server)
    login.password = "wrong"
    backend = open_backend(server.tcp_url, credential_provider=login.give)
    with pytest.raises(PermissionDenied) as caught:
        await backend.open()
    assert "\n" not in str(caught.value)
    assert "wrong" not in str(caught.value)
    login.password = "first/password"
    await work(backend)
    await backend.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "redis://worker:secret@127.0.0.1",
        "redis://worker@127.0.0.1",
        "redis://127.0.0.1?credential_provider=logins:login",
        "file:///tmp/queues",
        "memory://queues",
    ],
)
def test_a_provider_that_does_not_fit_the_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(InvalidURL, match="credential_provider") as caught:
        open_backend(url, credential_provider=lambda: "password")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["nothing_of_this_name:login", "os:nothing_of_this_name", "os", "os:", ":login", "os:sep"]
)
def test_an_import_path_that_leads_to_no_provider_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(InvalidURL, match="credential_provider") as caught:
        open_backend(f"redis://127.0.0.1?credential_provider={path}")
    assert "\n" not in str(caught.value)
