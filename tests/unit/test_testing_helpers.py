"""The helpers for tests of apps: clear failures, and queues in memory that refuse what the app's store refuses."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from qworker import Backoff, Draft, Fail, Retry, Tasks
from qworker.backend.registry import open_backend
from qworker.errors import InvalidArguments, NotSupported
from qworker.failure_text import RemoteFailure
from qworker.testing import FakeClock, in_memory, run_until_idle
from tests.support.waiting import work_for


@pytest.fixture
def tasks():
    # Its time stands still: nothing that is to run again later does so in between.
    with in_memory(Tasks("file://./never-made"), FakeClock()) as tasks:
        yield tasks


async def test_the_first_failure_is_raised_once_nothing_is_left(tasks):
    @tasks.task
    async def bad() -> None:
        raise ValueError("no luck")

    @tasks.task
    def good() -> None:
        ran.append(1)

    ran = []
    await bad.enqueue()
    await good.enqueue()
    with pytest.raises(ValueError, match="no luck") as raised:
        await run_until_idle(tasks, concurrency=1, raise_failures=True)
    assert ran == [1]
    assert "in bad" in "".join(traceback.format_exception(raised.value))
    assert (await run_until_idle(tasks, raise_failures=True)).leased == 0


@pytest.mark.parametrize("error", [Retry("later"), Fail("never"), KeyError("a")])
async def test_outcomes_are_raised_as_they_were(tasks, error):
    @tasks.task
    def work() -> None:
        raise error

    await work.enqueue()
    with pytest.raises(type(error)) as raised:
        await run_until_idle(tasks, raise_failures=True)
    assert raised.value is error


async def test_failures_that_are_no_exceptions_of_a_handler_are_raised_too(tasks):
    @tasks.task(timeout=0.01, retry=Backoff(initial=1000.0))
    async def slow(n: int = 0) -> None:
        await work_for(3600)

    @tasks.task(max_tries=1)
    async def leaving() -> None:
        raise SystemExit(3)

    await slow.enqueue()
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 seconds"):
        await run_until_idle(tasks, raise_failures=True)
    await leaving.enqueue()
    with pytest.raises(RuntimeError, match="task 'leaving': SystemExit: 3") as raised:
        await run_until_idle(tasks, raise_failures=True)
    assert isinstance(raised.value.__cause__, SystemExit)
    backend = await tasks.backend()
    await backend.publish("default", [Draft(body=b'{"task":"slow","args":["x"]}')])
    with pytest.raises(InvalidArguments):
        await run_until_idle(tasks, raise_failures=True)
    await backend.publish("default", [Draft(body=b'{"task":"leaving"}', tries=1)])
    with pytest.raises(RuntimeError, match="max_tries reached"):
        await run_until_idle(tasks, raise_failures=True)


def boom() -> None:
    raise ValueError("in a process")


async def test_the_failure_of_a_process_is_raised_with_its_text(tasks):
    work = tasks.task(process=True, max_tries=1)(boom)
    await work.enqueue()
    with pytest.raises(RemoteFailure, match="ValueError: in a process"):
        await run_until_idle(tasks, raise_failures=True)


# -- queues in memory ------------------------------------------------------------------------------------------------

ALL = Draft(body=b"x", priority=3, unique_key="k", id="an-id", argv=("a",), fields={"f": "v"})
EACH = [Draft(body=b"x", **{name: getattr(ALL, name)}) for name in ("priority", "unique_key", "id", "argv", "fields")]


@pytest.mark.parametrize("scheme", ["file", "fsq", "mq", "sq", "vsqs"])
async def test_memory_refuses_what_the_apps_own_store_refuses_and_says_the_same(tmp_path: Path, scheme):
    own = open_backend(f"{scheme}://{tmp_path}/root")
    await own.create("q")
    tasks = Tasks(f"{scheme}://{tmp_path}/never-made")
    with in_memory(tasks):
        memory = await tasks.backend()
        for draft in EACH:
            assert await refusal(memory, draft) == await refusal(own, draft)
    assert not (tmp_path / "never-made").exists()
    await own.aclose()


@pytest.mark.parametrize(
    ("url", "own_id"),
    [("rfq://nowhere.invalid/0", "0" * 32), ("mq:///nowhere", "0" * 8 + "-0000-1000-8000-" + "0" * 12)],
)
async def test_memory_takes_the_ids_that_the_apps_own_store_takes(url: str, own_id: str):
    with in_memory(Tasks(url)) as tasks:
        memory = await tasks.backend()
        assert await memory.publish("q", [Draft(body=b"x", id=own_id)]) == [own_id]
        with pytest.raises(NotSupported, match="given ids"):
            await memory.publish("q", [Draft(body=b"x", id="chosen")])


async def refusal(backend, draft: Draft) -> str | None:
    try:
        await backend.publish("q", [draft])
    except NotSupported as error:
        return str(error)
    return None


async def test_a_message_that_the_directory_has_no_place_for_fails_in_the_test(tasks):
    @tasks.task
    async def work() -> None: ...

    with pytest.raises(NotSupported, match="file: does not support"):
        await (await tasks.backend()).publish("q", [Draft(body=b"x", fields={"a": "b"})])
    await work.enqueue()
    await tasks.aclose()
    assert (await run_until_idle(tasks)).acked == 1


async def test_queues_in_memory_within_queues_in_memory_refuse_the_same(tasks):
    with in_memory(tasks), pytest.raises(NotSupported):
        await (await tasks.backend()).publish("q", [Draft(body=b"x", fields={"a": "b"})])


async def test_an_app_without_a_url_or_with_one_that_refuses_nothing_keeps_everything_in_memory(monkeypatch):
    monkeypatch.delenv("QWORKER_URL", raising=False)
    for tasks in (Tasks(), Tasks("memory:"), Tasks("redis://nowhere.invalid/0")):
        with in_memory(tasks) as inside, in_memory(inside):

            @tasks.task
            async def work() -> None: ...

            await work.using(priority=3, unique_key="x").enqueue()
        with pytest.raises(NotSupported, match="only a worker"), in_memory(tasks):
            raise NotSupported("only a worker")
