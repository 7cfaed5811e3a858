"""The pytest plugin as the projects of others use it."""

from __future__ import annotations

import pytest

from qworker.errors import MissingExtra
from tests.support.missing_modules import output_without

pytest_plugins = ["pytester"]

APP = """
from qworker import Context, Fail, Retry, Tasks

tasks = Tasks()
seen = []

@tasks.task(queue="mail", max_tries=2)
async def welcome(name: str, polite: bool = True) -> None:
    if name == "nobody":
        raise Fail("there is no such user")
    if name == "busy" and not seen:
        seen.append("busy at first")
        raise Retry(delay=60)
    seen.append(name)

@tasks.task
def count(context: Context, number: int) -> None:
    seen.append(number)
    if number:
        count.enqueue_sync(number - 1)

async def sign_up(name: str) -> None:
    await welcome.using(unique_key=name, delay=3600).enqueue(name, polite=False)
"""

CONFTEST = """
import pytest
import asyncio

import shop

pytest_plugins = ["qworker.testing"]

@pytest.fixture(autouse=True)
def queues(qworker_memory):
    shop.seen.clear()
    yield qworker_memory(shop.tasks)
"""

TESTS = """
import asyncio

import shop
from qworker import State
from qworker.backend.listing import list_messages
from qworker.message import Query
from qworker.testing import enqueued_calls, run_until_idle

async def test_signing_up_enqueues_a_welcome():
    await shop.sign_up("ada")
    await shop.sign_up("ada")
    (call,) = await enqueued_calls(shop.tasks)
    assert (call.task, call.args, call.kwargs, call.unique_key) == ("welcome", ("ada",), {"polite": False}, "ada")
    assert (call.queue, call.state) == ("mail", State.DELAYED)
    assert shop.seen == []

async def test_what_is_due_later_stays_until_its_time(qworker_clock):
    await shop.sign_up("ada")
    await run_until_idle(shop.tasks)
    assert shop.seen == []
    qworker_clock.advance(3601)
    await run_until_idle(shop.tasks)
    assert shop.seen == ["ada"]
    assert await enqueued_calls(shop.tasks) == []

async def test_a_retry_waits_for_its_delay(qworker_clock):
    await shop.welcome.enqueue("busy")
    await run_until_idle(shop.tasks)
    (call,) = await enqueued_calls(shop.tasks, "mail")
    assert (call.tries, call.state) == (1, State.DELAYED)
    qworker_clock.advance(61)
    await run_until_idle(shop.tasks)
    assert shop.seen == ["busy at first", "busy"]

async def test_a_failure_is_kept():
    await shop.welcome.enqueue("nobody")
    counts = await run_until_idle(shop.tasks)
    backend = await shop.tasks.backend()
    (failed,) = await list_messages(backend, "mail", Query(State.FAILED))
    assert "no such user" in failed.error

def test_plain_functions_need_no_loop():
    shop.count.enqueue_sync(3)
    asyncio.run(run_until_idle(shop.tasks))
    assert shop.seen == [3, 2, 1, 0]

async def test_each_test_begins_with_empty_queues():
    assert await enqueued_calls(shop.tasks) == []
"""

SETTINGS = """
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""

BROKEN = """
from qworker_memory import MemoryBackend


class ForgetfulBackend(MemoryBackend):
    async def settle(self, settlements):
        return []


class HastyBackend(MemoryBackend):
    async def lease(self, queue, limit, visibility, timeout=0.0):
        return await super().lease(queue, limit, visibility)


class OverstatedBackend(MemoryBackend):
    deviations = {"priority": "it says that it has none, and has them"}
"""


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", *args, timeout=50)


def test_a_project_tests_its_app_with_queues_in_memory(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QWORKER_URL", raising=False)
    pytester.makefile(".ini", pytest=SETTINGS)
    pytester.makepyfile(shop=APP, conftest=CONFTEST, test_shop=TESTS)
    run(pytester).assert_outcomes(passed=6)


def test_the_suite_runs_alone_against_a_url(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): raise AssertionError('not asked for')")
    result = run(pytester, "-p", "qworker.testing", "--qworker-url", "memory://mine", "-k", "Settling or settle")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["qworker: contract of memory://mine"])
    assert result.parseoutcomes()["passed"] > 5


@pytest.mark.parametrize(
    ("backend", "test"),
    [
        ("ForgetfulBackend", "test_a_stale_holder_can_settle_nothing"),
        ("HastyBackend", "test_a_lease_that_gives_nothing_has_waited"),
        ("OverstatedBackend", "test_a_higher_priority"),
    ],
)
def test_the_suite_finds_a_broken_backend(pytester: pytest.Pytester, backend: str, test: str) -> None:
    # A distribution of somebody else's, found by its entry point.
    info = pytester.mkdir("broken-1.0.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[qworker.backends]\nbroken = broken:{backend}\n")
    pytester.makepyfile(broken=BROKEN)
    pytester.syspathinsert()
    result = run(pytester, "-p", "qworker.testing", "--qworker-url", "broken://x", "-k", test)
    result.assert_outcomes(failed=1, deselected=result.parseoutcomes()["deselected"])


def test_a_wrong_url_is_one_line(pytester: pytest.Pytester) -> None:
    result = run(pytester, "-p", "qworker.testing", "--qworker-url", "nowhere://x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: no backend is installed for 'nowhere:'. Installed: *"])
    assert "Traceback" not in result.stderr.str()


def test_without_the_extra_the_suite_says_in_one_line_what_to_install(pytester: pytest.Pytester) -> None:
    missing = str(MissingExtra("testing", "the contract suite"))
    result = run(pytester, "-p", "no:asyncio", "-p", "qworker.testing", "--qworker-url", "memory://mine")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.lines == [f"ERROR: {missing}", ""]
    for module in ("pytest", "pytest_asyncio"):
        program = (
            "from qworker.errors import MissingExtra\n"
            "import qworker.testing\n"
            "try: import qworker.testing.contract\n"
            "except MissingExtra as error: print(error)\n"
        )
        assert output_without((module,), program) == f"{missing}\n"


def test_the_tick_of_the_suite_is_a_duration(pytester: pytest.Pytester) -> None:
    arguments = ("-p", "qworker.testing", "--qworker-url", "memory://tick", "-k", "test_describe_names_the_store")
    run(pytester, *arguments, "--qworker-tick", "2s").assert_outcomes(passed=1)
    result = run(pytester, *arguments, "--qworker-tick", "soon")
    result.stderr.fnmatch_lines(["*--qworker-tick: 'soon' is not a valid duration: use seconds (90) or 15m, 2h, 7d*"])
