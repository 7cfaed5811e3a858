"""Messages that move while they are looked for."""

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.kit.find import find_each, stamp
from qworker.message import Draft, Message, State, StoredMessage
from qworker_file.browse import FileBrowser


def stored(name: str) -> StoredMessage:
    return StoredMessage(message=Message(id=name, queue="q", body=b""), state=State.READY)


class Seen:
    """Looks of which each sees what is listed for it."""

    def __init__(self, *looks: str) -> None:
        self._looks = list(looks)
        self.wanted: list[set[str]] = []

    async def look(self, wanted: frozenset[str]) -> AsyncIterator[StoredMessage]:
        self.wanted.append(set(wanted))
        for name in self._looks.pop(0):
            if name in wanted:
                yield stored(name)


async def test_what_a_look_has_missed_is_looked_for_again_and_alone() -> None:
    seen = Seen("ac", "a", "b", "")
    assert [one.message.id for one in await find_each("cbabx", seen.look)] == ["c", "b", "a"]
    assert seen.wanted == [{"a", "b", "c", "x"}, {"b", "x"}, {"b", "x"}, {"x"}]


async def test_one_look_is_enough_when_everything_is_found_or_nothing_has_changed() -> None:
    seen = Seen("ab", "a")
    assert len(await find_each("ab", seen.look)) == 2
    assert len(await find_each("ab", seen.look, lambda: (1, 2))) == 1
    assert await find_each("", seen.look) == []


def test_a_directory_that_has_just_changed_has_no_stamp(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert stamp([fd]) is None
        os.utime(tmp_path, (0, time.time() - 10))
        before = stamp([fd])
        assert before == stamp([fd])
        (tmp_path / "new").touch()
        os.utime(tmp_path, (0, time.time() - 5))
        assert stamp([fd]) not in {None, before}
    finally:
        os.close(fd)


async def test_many_ids_cost_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend(f"file://{tmp_path / 'spool'}")
    listed: list[State] = []

    async def counted(browser: FileBrowser, *states: State, real=FileBrowser.slices) -> AsyncIterator[object]:
        for state in states:
            listed.append(state)
            async for files in real(browser, state):
                yield files

    monkeypatch.setattr(FileBrowser, "slices", counted)
    try:
        ids = await backend.publish("q", [Draft(body=b"%d" % number) for number in range(100)])
        assert len(await backend.find("q", ids)) == 100
        assert listed == [State.READY]
    finally:
        await backend.aclose()
