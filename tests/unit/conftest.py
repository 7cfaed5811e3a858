"""Workers in tests: each test gets an app on a memory store of its own, whose calls can be made to fail."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import hypothesis
import pytest

from qworker import State, Tasks
from qworker.backend.listing import list_messages
from qworker.errors import BackendUnavailable
from qworker.kit.retention import KEEP_ALL
from qworker.message import Query
from qworker.sampling import QueueSampler
from qworker.worker import Worker, WorkerOptions
from qworker.worker.lease_extender import LeaseExtender
from qworker.worker.state import WorkerState
from qworker_memory import MemoryBackend
from tests.support.depth import DEPTH
from tests.support.waiting import PATIENCE

_names = itertools.count()

# A machine that is slow for a moment is no failure.
hypothesis.settings.register_profile(
    "unit", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], max_examples=60 * DEPTH
)
hypothesis.settings.load_profile("unit")


class Flaky(MemoryBackend):
    """A memory store. Calls in `broken` raise, `hook` gets each call's name, and `commits` lets settlements end."""

    def __init__(self, name: str) -> None:
        super().__init__(name, keep_done=KEEP_ALL)
        self.broken: set[str] = set()
        self.hook: Callable[[str], Any] = lambda _call: None
        self.commits = asyncio.Event()
        self.commits.set()

    def _called(self, call: str) -> None:
        self.hook(call)
        if call in self.broken:
            raise BackendUnavailable(f"{call} does not answer")

    async def lease(self, *args: Any) -> Any:
        self._called("lease")
        return await super().lease(*args)

    async def wait(self, *args: Any) -> Any:
        self._called("wait")
        await super().wait(*args)
        if "wait" in self.broken:
            self._called("wait")

    async def settle(self, *args: Any) -> Any:
        self._called("settle")
        refused = await super().settle(*args)
        await self.commits.wait()
        return refused

    async def reap(self, *args: Any) -> Any:
        self._called("reap")
        return await super().reap(*args)

    def extend(self, *args: Any) -> Any:
        self._called("extend")
        return super().extend(*args)


class App(Tasks):
    """An app whose store the test holds in its hands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(f"memory://unit-{next(_names)}", **options)
        self.store = Flaky(self.url.removeprefix("memory://"))

    async def backend(self) -> Flaky:
        return self.store

    async def found(self, state: State, queue: str = "default") -> list[Any]:
        """What is stored in a state."""
        return await list_messages(self.store, queue, Query(state))

    async def waiting(self) -> list[Any]:
        """What is delayed or ready. A message that becomes ready between the two looks is one message."""
        found = [*await self.found(State.DELAYED), *await self.found(State.READY)]
        return list({stored.message.id: stored for stored in found}.values())

    async def burst(self, **options: Any) -> Worker:
        """Work until nothing is left; the worker that did."""
        worker = Worker(self, WorkerOptions(burst=True, **options), draw=lambda: 0.0)
        async with asyncio.timeout(40):
            assert await worker.run()
        return worker

    @asynccontextmanager
    async def working(self, **options: Any) -> AsyncIterator[tuple[Worker, "asyncio.Task[bool]"]]:
        """A worker at work, and its `run`; aborted at the end if it still runs."""
        worker = Worker(self, WorkerOptions(**options), draw=lambda: 0.0)
        running = asyncio.create_task(worker.run())
        try:
            yield worker, running
        finally:
            worker.cancel_handlers()
            async with asyncio.timeout(40):
                await asyncio.wait([running])


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def make_app() -> type[App]:
    return App


@pytest.fixture
def patient_dashboards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard that waits as long as its tests for what the store has.

    Otherwise a page after a pause of the machine lacks what was not there within a second or two, or says that the
    store does not answer.
    """
    for name in (
        *("watch._PATIENCE_S", "watch._SILENT_S", "looks._PATIENCE_S", "reads._PATIENCE_S", "scans._PATIENCE_S"),
        *("pages.lists._SECONDS", "pages.activity._SECONDS"),
    ):
        monkeypatch.setattr(f"qworker.ui.{name}", PATIENCE)
    monkeypatch.setattr(QueueSampler.tick, "__defaults__", (PATIENCE,))


@pytest.fixture
def quick_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are extended a few times a second, however long they are.

    So a test that waits for extensions needs no short lease, which it would lose when it is suspended for a second.
    """
    begin = LeaseExtender.__init__

    def begin_quickly(extender: LeaseExtender, state: WorkerState) -> None:
        begin(extender, state)
        extender._round = 0.1

    monkeypatch.setattr(LeaseExtender, "__init__", begin_quickly)
