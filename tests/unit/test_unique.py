"""Unique keys as an app sees them: their options, the keys of calls, and what a call reports."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from qworker import Draft, Tasks, Unique
from qworker.errors import AlreadyEnqueued, InvalidName, NotSupported, PermissionDenied, UsageError
from qworker.kit.doctor_check import CheckStatus
from qworker.message import SettleAction, Settlement
from qworker.server.error_responses import to_error_response
from qworker.testing import enqueued_calls
from qworker.tools.doctor import run_checks


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    app = Tasks("memory://unique-keys")
    yield app
    backend = await app.backend()
    await backend.delete("default")
    await app.aclose()


async def test_a_call_with_the_values_of_another_one_is_not_stored_and_says_so(tasks: Tasks) -> None:
    @tasks.task(unique=Unique(by=("user",)))
    async def reindex(user: int, full: bool = False) -> None: ...

    @tasks.task(unique=Unique(by=("user", "full")))
    async def other(user: int, full: bool = False) -> None: ...

    first = await reindex.enqueue(7)
    again = await reindex.enqueue(user=7, full=True)
    assert (first.existed, again.existed, again.id) == (False, True, first.id)
    assert (await reindex.enqueue(8)).existed is False
    # Of another task, and with the default value.
    assert (await other.enqueue(7)).existed is False
    assert (await other.enqueue(7, full=False)).existed is True
    keys = {call.unique_key for call in await enqueued_calls(tasks)}
    assert keys == {"reindex(user=7)", "reindex(user=8)", "other(user=7,full=false)"}


async def test_a_key_of_long_values_is_a_digest(tasks: Tasks) -> None:
    @tasks.task(unique=Unique(by=("text",)))
    async def work(text: str) -> None: ...

    assert len({(await work.enqueue("x" * 300 + end)).id for end in "aab"}) == 2


async def test_the_options_of_a_call_replace_those_of_the_task(tasks: Tasks) -> None:
    @tasks.task(unique=Unique(by=("user",)))
    async def work(user: int) -> None: ...

    first = await work.using(unique_key="all").enqueue(1)
    assert (await work.using(unique=Unique(key="all")).enqueue(2)).id == first.id
    with pytest.raises(AlreadyEnqueued, match="the unique key 'all' is already enqueued") as refused:
        await work.using(unique=Unique(key="all", again="error")).enqueue(3)
    assert refused.value.id == first.id
    jobs = await tasks.enqueue_many([work.using(unique_key="all").call(4), work.call(4), work.call(4)])
    assert [job.existed for job in jobs] == [True, False, True]


async def test_a_task_by_name_has_keys_but_no_parameters(tasks: Tasks) -> None:
    absent: Any = tasks.named("elsewhere.work")
    assert (await absent.using(unique_key="k").enqueue(1)).existed is False
    assert (await absent.using(unique=Unique(key="k")).enqueue(2)).existed is True
    with pytest.raises(UsageError, match="needs the function of the task"):
        await absent.using(unique=Unique(by=("user",))).enqueue(1)


def test_a_key_by_an_unknown_parameter_is_refused_at_registration(tasks: Tasks) -> None:
    def reindex(user: int, full: bool = False) -> None: ...

    text = r"task 'reindex': unique by 'usr' names no parameter: it takes \(user, full\)"
    with pytest.raises(UsageError, match=text):
        tasks.task(unique=Unique(by=("usr",)))(reindex)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"key": "k", "by": ("user",)}, "key and by cannot be given together"),
        ({"by": "user"}, "by must be names of parameters"),
        ({"by": ()}, "by must name at least one parameter"),
        ({"key": "k", "until": "never"}, "until must be one of done, started"),
        ({"key": "k", "again": "drop"}, "again must be one of keep, replace, debounce, error"),
        ({"key": "k", "wait": 2}, 'wait= needs again="debounce"'),
        ({"key": "k", "again": "debounce"}, "wait must be more than 0 seconds"),
        ({"key": "k", "again": "debounce", "wait": 5, "at_most": 2}, "at_most must be at least wait"),
        ({"key": "k", "again": "replace", "scope": "app"}, 'scope="app" cannot have again="replace"'),
    ],
)
def test_wrong_options_are_refused_with_one_line(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Unique(**options)


def test_a_key_that_is_empty_is_refused() -> None:
    with pytest.raises(InvalidName):
        Unique(key="")


def test_times_can_be_timedeltas() -> None:
    unique = Unique(key="k", again="debounce", wait=timedelta(seconds=2), at_most=timedelta(seconds=10))
    assert (unique.wait, unique.at_most) == (2.0, 10.0)


def test_options_without_a_key_are_refused(tasks: Tasks) -> None:
    def work() -> None: ...

    with pytest.raises(UsageError, match="unique needs key= or by="):
        tasks.task(unique=Unique(until="started"))(work)


@pytest.mark.parametrize(
    ("url", "unique", "text"),
    [
        ("sq:///nowhere", Unique(key="k"), "sq: does not support unique keys"),
        (
            "redis+cluster://nowhere.invalid",
            Unique(key="k", scope="app"),
            r"redis\+cluster: does not support unique keys across",
        ),
    ],
)
def test_a_store_that_cannot_do_it_refuses_at_registration(url: str, unique: Unique, text: str) -> None:
    def work() -> None: ...

    with pytest.raises(NotSupported, match=text):
        Tasks(url).task(unique=unique)(work)


async def test_a_file_system_without_exchanges_refuses_a_replacing_call_and_the_doctor_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/root?sync=off"
    checks = {check.name: check for check in await run_checks(url)}
    assert checks["exchange"].health is CheckStatus.OK

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("qworker.kit.files.exchange_names", refuse)
    app = Tasks(url)
    backend = await app.backend()
    with pytest.raises(PermissionDenied, match="this file system has no exchanges of two files"):
        await backend.publish("q", [Draft(body=b"x", unique_key="k", unique=Unique(again="replace"))])
    assert (await backend.stats("q")).ready == 0
    checks = {check.name: check for check in await run_checks(url)}
    assert checks["exchange"].health is CheckStatus.WARN
    await app.aclose()


async def test_links_among_the_keys_of_the_app_are_no_paths_and_those_of_gone_messages_are_removed(
    tmp_path: Path,
) -> None:
    app = Tasks(f"file://{tmp_path}/root?sync=off")
    backend = await app.backend()
    draft = Draft(body=b"", unique_key="k", unique=Unique(scope="app"))
    (first,) = await backend.publish("q", [draft])
    (link,) = (tmp_path / "root" / ".keys").iterdir()
    assert os.readlink(link) == f"q/{first}"
    link.unlink()
    link.symlink_to("../names")
    (second,) = await backend.publish("q", [draft])
    assert os.readlink(link) == f"q/{second}"
    await backend.delete("q")
    await backend.create("other")
    (link.parent / ".other").mkdir()
    (link.parent / ".left").symlink_to(f"q/{second}")
    await backend.reap("other")
    assert [path.name for path in link.parent.iterdir()] == [".other"]
    await app.aclose()


@pytest.mark.parametrize("label", [75, 76])
async def test_a_long_label_does_not_cost_a_message_its_id_and_key_after_ten_tries(tmp_path: Path, label: int) -> None:
    app = Tasks(f"file://{tmp_path}/root?sync=off")
    backend = await app.backend()
    unique, name = Unique(until="started"), "i" * 64
    await backend.publish("q", [Draft(body=b"", id=name, unique_key="k", unique=unique, task="t" * label, tries=9)])
    (lease,) = await backend.lease("q", 1, 60)
    await backend.settle([Settlement(lease=lease, action=SettleAction.FAIL_TMP)])
    (lease,) = await backend.lease("q", 1, 60)
    assert (lease.message.id, lease.message.tries, lease.message.unique_key) == (name, 10, "k")
    await app.aclose()


def test_a_debounced_call_with_a_due_time_is_refused_when_it_is_configured(tasks: Tasks) -> None:
    debounce = Unique(by=("document",), again="debounce", wait=2)

    @tasks.task(unique=debounce)
    async def save(document: str) -> None: ...

    for refused in (
        lambda: save.using(delay=1),
        lambda: save.using(due_at=2e9),
        lambda: save.using(unique=Unique(key="k", again="debounce", wait=1), delay=1),
        lambda: save.call("d").using(delay=1),
        lambda: tasks.named("elsewhere").using(unique=Unique(key="k", again="debounce", wait=1), delay=1),
        # So a schedule cannot get such a call.
        lambda: save.call("d").using(unique=debounce, due_at=2e9),
    ):
        with pytest.raises(UsageError, match="a debounced call is due after wait: leave delay= and due_at= out"):
            refused()
    assert save.using(unique_key="k", delay=1).call("d").draft.delay == 1


async def test_a_call_can_get_another_key_with_its_own_options(tasks: Tasks) -> None:
    @tasks.task(unique=Unique(by=("user",), until="started", again="replace"))
    async def work(user: int, full: bool = False) -> None: ...

    call = work.call(7)
    # Short for Unique(key="k"): nothing is left of the options of the task.
    plain = call.using(unique_key="k").draft
    assert (plain.unique_key, plain.unique) == ("k", None)
    by = call.using(unique=Unique(by=("user", "full"), until="started")).draft
    assert (by.unique_key, by.unique) == ("work(user=7,full=false)", Unique(until="started"))
    with pytest.raises(UsageError, match="unique by 'usr' names no parameter"):
        call.using(unique=Unique(by=("usr",)))
    with pytest.raises(UsageError, match="unique and unique_key cannot be given together"):
        call.using(unique=Unique(key="a"), unique_key="b")
    named = tasks.named("elsewhere").call(1)
    with pytest.raises(UsageError, match="needs the function of the task"):
        named.using(unique=Unique(by=("user",)))
    (first, second) = await tasks.enqueue_many([named.using(unique=Unique(key="n")), named.using(unique_key="n")])
    assert (second.id, second.existed) == (first.id, True)


@pytest.mark.parametrize("is_included", [False, True])
def test_what_calls_need_is_checked_again_when_the_url_comes(
    is_included: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QWORKER_URL", raising=False)
    app: Tasks = Tasks()

    @app.task
    async def work() -> None: ...

    work.using(unique=Unique(key="k"), max_tries=None)
    outer: Tasks = Tasks() if is_included else app
    if is_included:
        outer.include(app)
    with pytest.raises(NotSupported, match="task 'work' has unique=, but sq: does not support unique keys"):
        outer.url = "sq:///nowhere"
    outer.url = "memory://late"


def test_a_key_that_is_held_is_a_conflict_for_http() -> None:
    status, _, body = to_error_response(AlreadyEnqueued("unique key 'k' is held by ID", "ID"))
    assert (status, body[:14]) == (409, b"unique key 'k'")
