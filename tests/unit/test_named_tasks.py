"""Tasks by name, the tasks of a library's app, modules that only workers import, and URLs that are set late."""

from __future__ import annotations

import asyncio
import datetime
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from qworker import FailedCall, Hook, Tasks
from qworker.errors import DuplicateTask, InvalidArguments, NotSupported, UnknownTask, UsageError
from qworker.testing import enqueued_calls, in_memory, run_until_idle
from tests.support.apps import close_app
from tests.support.servers import RedisServer


@pytest.fixture(params=["file", "redis"])
def store_url(request, tmp_path):
    if request.param == "file":
        yield f"file://{tmp_path}/spool"
    else:
        with RedisServer() as server:
            yield server.url


@pytest.fixture
def tasks(request):
    return Tasks(f"memory://named-{request.node.name}")


def refusal(attempt, kind=UsageError) -> str:
    with pytest.raises(kind) as raised:
        attempt()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_module_that_adds_imports_while_it_is_imported_has_them_imported_too():
    app, found = Tasks("memory://", imports=["plugins"]), []

    def import_module(name: str) -> None:
        found.append(name)
        if name == "plugins":
            app.imports += ("lib.jobs",)

    app._import_modules(import_module)
    assert found == ["plugins", "lib.jobs"]


def nothing() -> None: ...


def take(message: Any) -> None: ...


# -- by name ---------------------------------------------------------------------------------------------------------


async def test_a_task_that_this_process_does_not_have_is_enqueued_by_its_name(store_url):
    web, worker = Tasks(store_url), Tasks(store_url)
    job = await web.named("mail.send").using(id="m-1", headers={"a": "b"}).enqueue("a@example.org", subject="Hi")
    await asyncio.to_thread(web.named("mail.send", queue="slow").enqueue_sync, 1)
    await web.enqueue_many([web.named("mail.send").call(2)])
    assert (job.id, job.queue) == ("m-1", "default")
    calls = await enqueued_calls(web, "default")
    assert [(call.task, call.args, dict(call.kwargs), dict(call.headers)) for call in calls] == [
        ("mail.send", ("a@example.org",), {"subject": "Hi"}, {"a": "b"}),
        ("mail.send", (2,), {}, {}),
    ]

    @worker.task(name="mail.send", queue="slow")
    async def send(to: Any, subject: str = "") -> None:
        sent.append((to, subject))

    sent: list[tuple[Any, str]] = []
    await run_until_idle(worker)
    assert sent == [(1, "")]
    await close_app(web)


async def test_a_named_task_that_the_app_has_takes_its_options_and_checks_arguments(tasks):
    named = tasks.named("work")

    @tasks.task(queue="slow", priority=7)
    async def work(a: int) -> None: ...

    await named.enqueue(1)
    await named.using(priority=2, queue="other").enqueue(2)
    await tasks.named("work", queue="third").enqueue(3)
    for queue, priority in (("slow", 7), ("other", 2), ("third", 7)):
        (call,) = await enqueued_calls(tasks, queue)
        assert (call.task, call.priority) == ("work", priority)
    for attempt in (named.enqueue(), named.using(delay=1).enqueue(1, 2)):
        with pytest.raises(InvalidArguments, match="task 'work'"):
            await attempt


async def test_the_publishing_hooks_of_the_app_see_calls_by_name(request):
    class Marked(Hook):
        def publishing(self, call):
            return call.with_headers({"marked": call.task})

    class ForThreads(Marked):
        kinds = frozenset({"thread"})

        def publishing(self, call):
            raise AssertionError("the function may be of another kind")

    tasks = Tasks(f"memory://{request.node.name}", hooks=[Marked(), ForThreads()])
    await tasks.named("far.away").enqueue()
    (call,) = await enqueued_calls(tasks, "default")
    assert call.headers == {"marked": "far.away"}


async def test_the_result_of_a_task_that_this_process_does_not_have_has_the_given_type(store_url):
    web, worker = Tasks(store_url), Tasks(store_url)

    @worker.task(name="when", result=60)
    async def when(days: int) -> datetime.date:
        return datetime.date(2026, 1, days)

    worker.task(name="count")(len)
    job = await web.named("when", result=datetime.date).enqueue(2)
    plain = await web.named("when").enqueue(3)
    off = await web.named("when").using(result=None).enqueue(4)
    kept = await web.named("count", result=int).using(result=60).enqueue([1, 2])
    (many,) = await web.enqueue_many([web.named("when", result=datetime.date).call(5)])
    await run_until_idle(worker)
    assert await job.result(timeout=0) == datetime.date(2026, 1, 2)
    assert await plain.result(timeout=0) == "2026-01-03"
    assert await kept.result(timeout=0) == 2
    assert await many.result(timeout=0) == datetime.date(2026, 1, 5)
    with pytest.raises(UsageError, match="keeps no result"):
        await off.result(timeout=0)


async def test_a_named_task_that_the_app_has_takes_its_result_too(tasks):
    @tasks.task(result=60)
    async def when(days: int) -> datetime.date:
        return datetime.date(2026, 1, days)

    own = await tasks.named("when").enqueue(1)
    given = await tasks.named("when", result=str).using(result=9).enqueue(2)
    await run_until_idle(tasks)
    assert await own.result(timeout=0) == datetime.date(2026, 1, 1)
    assert await given.result(timeout=0) == "2026-01-02"


def test_what_cannot_be_a_named_task_is_refused_in_one_line(tasks):
    assert "result= is a type here (got 60)" in refusal(lambda: tasks.named("a", result=60))
    assert "no JSON value can become" in refusal(lambda: tasks.named("a", result=threading.Thread))
    assert "write result=3600" in refusal(lambda: tasks.named("a").using(result=True))
    assert refusal(lambda: tasks.named("")).startswith("name must not be empty")
    assert refusal(lambda: tasks.named(5)) == "name must be text (got 5)"
    assert "not a valid queue name" in refusal(lambda: tasks.named("a", queue="no/slash"))
    assert refusal(lambda: tasks.named("a").using(countdown=3)).startswith("using() has no option 'countdown'")
    assert refusal(lambda: tasks.named("a").using(hold=3)) == "hold= needs id=: give the message an id"
    with pytest.raises(AttributeError, match=r"write `await task\.enqueue"):
        tasks.named("a").delay()


# -- the app of a library --------------------------------------------------------------------------------------------


def library() -> tuple[Tasks, Any]:
    tasks = Tasks()

    @tasks.task
    async def clean(days: int) -> None:
        ran.append(days)

    ran: list[int] = []
    vars(tasks)["ran"] = ran
    return tasks, clean


async def test_an_included_task_is_enqueued_to_the_store_of_the_app_and_run_there(store_url):
    lib, clean = library()
    soon = clean.using(headers={"a": "b"})
    enqueue = clean.enqueue
    app = Tasks(store_url)
    app.include(lib, prefix="lib.", queue="lib")
    assert (clean.name, clean.queue, app["lib.clean"], app.queue_names()) == ("lib.clean", "lib", clean, ["lib"])
    # In every way in which the library may do it.
    jobs = [
        await clean.enqueue(1),
        await soon.enqueue(2),
        await enqueue(3),
        await asyncio.to_thread(clean.enqueue_sync, 4),
    ]
    jobs += await lib.enqueue_many([clean.call(5)])
    jobs += [
        await lib["clean"].enqueue(6),
        await lib.named("clean").enqueue(7),
        await app.named("lib.clean").enqueue(8),
    ]
    assert {job.queue for job in jobs} == {"lib"}
    assert [call.task for call in await enqueued_calls(app)] == ["lib.clean"] * 8
    assert (await run_until_idle(app)).acked == 8
    assert sorted(vars(lib)["ran"]) == list(range(1, 9))
    assert lib.url == store_url
    await close_app(app)


async def test_the_jobs_of_an_included_task_follow_it(store_url):
    lib = Tasks()
    reported: list[str] = []

    @lib.task
    async def report(call: FailedCall) -> None:
        reported.append(call.task)

    @lib.task(result=60, on_failure=report)
    async def double(number: int) -> int:
        return 2 * number

    longer = double.using(result=90)
    app = Tasks(store_url)
    app.include(lib, prefix="lib.", queue="lib")
    await double.using(id="one").enqueue(1)
    jobs = [await double.enqueue(2), await longer.enqueue(3), await lib.named("double").enqueue(4)]
    unwanted = await double.using(delay=60).enqueue(5)
    assert (await unwanted.status()).task == "lib.double"
    assert (await lib.cancel(task="double", state="delayed")).waiting == 1
    await run_until_idle(app)
    assert [await job.result(timeout=0) for job in jobs] == [4, 6, 8]
    assert await lib.job("one", "lib").result(timeout=0) == await double.job("one").result(timeout=0) == 2
    assert reported == ["lib.double"]
    await app.aclose()


def test_a_task_with_a_result_is_not_included_where_no_result_can_be_kept(tmp_path):
    lib = Tasks()
    lib.task(name="plain")(nothing)
    kept = lib.task(name="kept", result=60)(nothing)
    app = Tasks(f"sq://{tmp_path}/spool")
    assert "task 'lib.kept' has result=" in refusal(lambda: app.include(lib, prefix="lib."), NotSupported)
    assert (lib["kept"], list(app.registered_tasks)) == (kept, [])


async def test_what_a_library_registers_later_comes_too(tasks):
    lib, _ = library()
    tasks.include(lib, prefix="lib.", queue="lib")

    @lib.task(name="late")
    async def late() -> None: ...

    @lib.raw_handler()
    async def raw(message: Any) -> None: ...

    assert sorted(tasks.registered_tasks) == ["lib.clean", "lib.late"]
    assert tasks.raw_handlers["lib"].function is raw
    assert (await late.enqueue()).queue == "lib"
    assert (await run_until_idle(tasks)).acked == 1


async def test_a_library_can_include_another_one(tasks):
    inner, clean = library()
    middle = Tasks(imports=["b"])
    middle.include(inner, prefix="inner.")
    tasks.include(middle, prefix="middle.", queue="q")
    inner.task(name="late")(nothing)
    assert sorted(tasks.registered_tasks) == ["middle.inner.clean", "middle.inner.late"]
    assert (await clean.enqueue(1)).queue == "q"
    assert tasks.imports == ("b",)
    assert refusal(lambda: inner.include(tasks)).startswith("an app cannot include itself")


def test_a_task_belongs_to_one_app(tasks):
    lib, _ = library()
    other = Tasks("memory://other")
    tasks.include(lib, prefix="lib.")
    text = "task 'lib.clean' already belongs to {} app: include its app once"
    assert refusal(lambda: other.include(lib)) == text.format("another")
    assert refusal(lambda: tasks.include(lib)) == text.format("this")
    assert not other.registered_tasks


def test_an_include_that_is_not_possible_moves_nothing(tasks):
    lib, clean = library()
    tasks.task(name="clean")(nothing)
    assert "give include() another prefix=" in refusal(lambda: tasks.include(lib), DuplicateTask)
    for queue in ("a", "b"):
        lib.raw_handler(queue=queue)(take)
    assert "two raw handlers" in refusal(lambda: tasks.include(lib, prefix="lib.", queue="one"), DuplicateTask)
    assert (clean.name, lib["clean"], list(tasks.registered_tasks)) == ("clean", clean, ["clean"])
    tasks.include(lib, prefix="lib.")
    assert sorted(tasks.raw_handlers) == ["a", "b"]


def test_what_include_cannot_move_is_refused(tasks):
    assert refusal(lambda: tasks.include(tasks)).startswith("an app cannot include itself")
    assert refusal(lambda: tasks.include("lib")).startswith(
        "include() takes the Tasks object of another app (got 'lib'"
    )
    assert "has a lifespan" in refusal(lambda: tasks.include(Tasks(lifespan=lambda app: None)))
    lib = Tasks()
    lib.add_header_source(dict)
    assert "has header sources" in refusal(lambda: tasks.include(lib))
    taken = Tasks()
    tasks.include(taken)
    assert "another app includes this one" in refusal(lambda: taken.add_header_source(dict))
    assert "another app includes this one" in refusal(lambda: setattr(taken, "url", "memory:"))


async def test_the_hooks_of_the_app_run_around_those_of_an_included_one(request):
    class Told(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        async def around(self, attempt, go):
            told.append(self.name)
            return await go()

    told: list[str] = []
    lib = Tasks(hooks=[Told("lib")])

    @lib.task
    async def work() -> None: ...

    app = Tasks(f"memory://{request.node.name}", hooks=[Told("app")])
    app.include(lib)
    await work.enqueue()
    await run_until_idle(app)
    assert told == ["app", "lib"]


# -- imports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imports", ["shop.tasks", ["shop/tasks"], [5], ["a", ""], b"x"])
def test_imports_are_names_of_modules(imports):
    assert refusal(lambda: Tasks(imports=imports)).startswith("imports must be a list of names of modules")


def test_an_unknown_task_of_an_app_with_imports_says_how_to_call_it():
    text = refusal(lambda: Tasks(imports=["shop.tasks"])["send"], UnknownTask)
    assert "`qworker run` also imports shop.tasks" in text
    assert "tasks.named('send')" in text


# -- late URLs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_url(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QWORKER_URL", raising=False)


@pytest.mark.usefixtures("no_url")
async def test_a_url_can_be_set_until_the_first_call_and_not_after_it(tmp_path):
    tasks = Tasks()

    @tasks.task
    async def work() -> None: ...

    with pytest.raises(UsageError, match=r"no backend URL is set: .*set tasks\.url before the first call"):
        await work.enqueue()
    with pytest.raises(UsageError, match="no backend URL is set"):
        await asyncio.to_thread(work.enqueue_sync)
    tasks.url = f"file://{tmp_path}/one"
    tasks.url = f"file://{tmp_path}/two"
    await work.enqueue()
    await asyncio.to_thread(work.enqueue_sync)
    line = refusal(lambda: setattr(tasks, "url", f"file://{tmp_path}/three"))
    assert line == "the URL of this app is already in use: set tasks.url before the first call"
    # A factory that is called again with the same settings changes nothing.
    tasks.url = f"file://{tmp_path}/two"
    assert len(await enqueued_calls(tasks)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two"]


@pytest.mark.usefixtures("no_url")
def test_a_url_that_is_no_text_is_refused():
    assert refusal(lambda: setattr(Tasks(), "url", Path("spool"))).startswith("url must be text (got PosixPath")


@pytest.mark.usefixtures("no_url")
def test_a_forked_child_has_the_url_that_was_set_late(tmp_path):
    tasks = Tasks()

    @tasks.task
    def work() -> None: ...

    tasks.url = f"file://{tmp_path}/spool"
    work.enqueue_sync()
    child = os.fork()
    if not child:
        try:
            work.enqueue_sync()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len(asyncio.run(enqueued_calls(tasks))) == 2


@pytest.mark.usefixtures("no_url")
async def test_in_tests_a_factory_sets_the_url_and_its_store_decides_what_is_refused(tmp_path):
    tasks = Tasks()

    @tasks.task
    async def work() -> None: ...

    with in_memory(tasks):
        tasks.url = f"sq://{tmp_path}/never-made"
        assert tasks.url.startswith("memory:")
        await work.enqueue()
        with pytest.raises(NotSupported, match="sq: does not support priorities"):
            await work.using(priority=1).enqueue()
        assert "already in use" in refusal(lambda: setattr(tasks, "url", "memory:"))
    assert tasks.url == f"sq://{tmp_path}/never-made"
    assert not list(tmp_path.iterdir())


async def test_in_memory_takes_the_place_of_the_store_of_the_app_that_includes_this_one(tasks):
    lib, clean = library()
    tasks.include(lib)
    with in_memory(lib):
        await clean.enqueue(1)
        assert len(await enqueued_calls(tasks)) == 1
    assert not await enqueued_calls(tasks)
