"""Ids that publishers give: any text, and how long they stay taken."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from qworker import Tasks
from qworker.envelope import ORIGINAL_ID
from qworker.errors import InvalidName, UsageError
from qworker.message import SettleAction, Settlement
from qworker.names import check_id, id_forms, new_id, to_message_id
from qworker.tools.explain import explain

_names = itertools.count()
ALPHABETS = {
    "letters": "aZ09",
    "punctuation": "._:-",
    "spaces": " \t\n",
    "paths": "/.~",
    "control": "\x01\x7f",
    "more": "é漢🎉",
}
LENGTHS = (1, 64, 65, 10_000)


def id_of(alphabet: str, size: int) -> str:
    """Return text of so many bytes; the last characters are letters if no other fits."""
    text = ""
    for character in itertools.cycle(alphabet):
        if len((text + character).encode()) > size:
            return text + "a" * (size - len(text.encode()))
        text += character
    raise AssertionError


IDS = {f"{name}-{size}": id_of(alphabet, size) for name, alphabet in ALPHABETS.items() for size in LENGTHS}


@pytest_asyncio.fixture(params=["memory", "file"])
async def tasks(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Tasks]:
    url = f"memory://given-{next(_names)}" if request.param == "memory" else f"file://{tmp_path}/root?sync=off"
    tasks = Tasks(url)
    yield tasks
    await tasks.aclose()


@given(st.text(min_size=1).filter(lambda text: text.isprintable() or text.isascii()))
def test_every_text_has_one_message_id(text: str) -> None:
    message_id = to_message_id(text)
    assert check_id(message_id) == message_id
    assert len(message_id) <= 64 or message_id == text
    assert to_message_id(message_id) == message_id
    assert message_id in id_forms(text)


@pytest.mark.parametrize("text", [new_id, lambda: "a", lambda: "0" * 64, lambda: "A.b:c_d-e"])
def test_an_id_that_a_message_can_have_is_not_changed(text: Any) -> None:
    chosen = text()
    assert to_message_id(chosen) == chosen
    assert id_forms(chosen) == (chosen,)


def test_the_id_of_a_long_host_name_is_not_changed() -> None:
    long = f"20261126215738_430442905_19983_{'pod-' * 10}x-81fd5886"
    assert len(long) > 64
    assert to_message_id(long) == long


def test_an_id_that_older_releases_stored_unchanged_has_two_forms() -> None:
    assert id_forms("0" * 65) == (to_message_id("0" * 65), "0" * 65)
    assert len(to_message_id("0" * 65)) == len("sha256-") + 52


@pytest.mark.parametrize("bad", ["", "\ud800"])
def test_an_id_without_a_byte_or_with_half_a_character_is_refused(bad: str) -> None:
    with pytest.raises(InvalidName):
        to_message_id(bad)


@pytest.mark.parametrize("chosen", IDS.values(), ids=IDS.keys())
async def test_a_call_with_any_id_is_stored_once_and_is_found_by_it(tasks: Tasks, chosen: str) -> None:
    @tasks.task
    def work() -> None: ...

    job = await work.using(id=chosen).enqueue()
    assert await work.using(id=chosen).enqueue() == job
    backend = await tasks.backend()
    assert (await backend.stats("default")).ready == 1
    found = await explain(backend, "default", chosen)
    assert found.id == job.id == to_message_id(chosen)
    assert found.stored is not None
    headers = json.loads(found.stored.message.body).get("headers", {})
    assert headers.get(ORIGINAL_ID, chosen) == chosen
    assert (ORIGINAL_ID in headers) == (job.id != chosen)


async def test_a_task_with_a_hold_keeps_the_ids_of_its_calls_taken(tasks: Tasks) -> None:
    @tasks.task(hold=timedelta(days=1))
    def work() -> None: ...

    await work.using(id="order-17").enqueue()
    await work.using(id="free", hold=0).enqueue()
    await work.enqueue()
    backend = await tasks.backend()
    leases = await backend.lease("default", 10, 60.0)
    assert await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases]) == []
    assert len(leases) == 3
    await work.using(id="order-17").enqueue()
    await work.using(id="free").enqueue()
    assert [lease.message.id for lease in await backend.lease("default", 10, 60.0)] == ["free"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hold": 1.0}, "hold= needs id=: give the message an id"),
        ({"hold": timedelta(days=1)}, "hold= needs id=: give the message an id"),
        ({"id": "a", "hold": -1.0}, "hold must be at least 0 seconds (got -1.0)"),
        ({"id": "a", "hold": "1h"}, "hold must be a number of seconds (got '1h')"),
    ],
)
def test_a_hold_is_checked_when_it_is_given(options: dict[str, Any], text: str) -> None:
    @Tasks("memory://").task
    def work() -> None: ...

    with pytest.raises(UsageError) as caught:
        work.using(**options)
    assert str(caught.value).startswith(text)
