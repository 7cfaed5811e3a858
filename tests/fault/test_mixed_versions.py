"""Processes of commit 31528ec and of today share a queue and die: no message is lost or acked twice."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import Query, State
from qworker.testing.wait_until import wait_until
from tests.fault import mixed_programs
from tests.fault.harness import kill
from tests.support.depth import DEPTH
from tests.support.old_code import FIRST, unpack_commit
from tests.support.servers import RedisServer
from tests.support.waiting import wait_for
from tests.support.written import FOLDER

# Of each publisher; in the deep tests 2,000.
COUNT = 2000 if DEPTH > 1 else 150
KILLS = 5 * DEPTH
PATIENCE = 120.0 * DEPTH

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# Who publishes, and who works.
ROLES = [(["old"], ["new"]), (["new"], ["old"]), (["old", "new"], ["old", "new"])]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the old code."""
    environment = unpack_commit(FIRST, folder := tmp_path_factory.mktemp("old"))
    code = (
        "import qworker, qworker_file, qworker_redis as r; print(qworker.__file__, qworker_file.__file__, r.__file__)"
    )
    # Not from the directory of this process: what `-c` imports is looked for there first.
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(folder)) for path in found.stdout.split()), found.stdout
    return environment


@pytest.fixture(params=["file", "redis"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The store in the words of each: everything that is done is kept."""
    if request.param == "file":
        base = f"file://{tmp_path}/spool?sync=off&"
        yield {"old": f"{base}keep_done=1", "new": f"{base}keep_done=all"}
        return
    with RedisServer() as server:
        yield {"old": f"{server.url}?keep_done=1", "new": f"{server.url}?keep_done=all"}


class Books:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def read(self, book: str) -> list[str]:
        path = self._folder / book
        return path.read_text().splitlines() if path.exists() else []


class Crowd:
    """Processes of both versions.

    Args:
        old: the environment of the old code.
        urls: of the store, by version.
        folder: for the ledger, and what the processes say.
        stack: ends them.
    """

    def __init__(self, old: dict[str, str], urls: dict[str, str], folder: Path, stack: ExitStack) -> None:
        self._old, self._urls, self._folder, self._stack = old, urls, folder, stack
        self.ledger = folder / "ledger"
        self.books = Books(self.ledger)

    def start(self, version: str, program: str, *rest: object) -> subprocess.Popen[bytes]:
        source = FOLDER / "program.py" if version == "old" else Path(mixed_programs.__file__)
        command = [sys.executable, str(source), program, self._urls[version], str(self.ledger), *map(str, rest)]
        with (self._folder / "said").open("ab") as said:
            process = subprocess.Popen(
                command,
                env=self._old if version == "old" else None,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self._stack.callback(kill, process)
        return process

    def said(self) -> str:
        return (self._folder / "said").read_text(errors="replace")[-3000:]

    def until_acked(self, count: int, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        def are_acked() -> bool:
            assert [worker.poll() for worker in workers] == [None] * len(workers), self.said()
            return len(self.books.read("acked")) >= count

        wait_for(are_acked, "progress", self.said, timeout=PATIENCE)


@pytest.mark.parametrize(("publishers", "workers"), ROLES, ids=["old-to-new", "new-to-old", "both-to-both"])
def test_processes_of_31528ec_and_of_today_share_a_queue_under_kills(
    old: dict[str, str], urls: dict[str, str], tmp_path: Path, publishers: list[str], workers: list[str]
) -> None:
    draw = random.Random(f"{publishers}{workers}")
    with ExitStack() as stack:
        crowd = Crowd(old, urls, tmp_path, stack)
        publishing = [crowd.start(version, "publish", COUNT, version) for version in publishers]
        # Two, so that one is there when the other one dies.
        working = [
            (version, crowd.start(version, "work", version)) for version in workers * (2 if len(workers) == 1 else 1)
        ]
        killed = 0
        for turn in range(KILLS):
            share = (turn + 1) * COUNT * len(publishers) // (KILLS + 2)
            crowd.until_acked(share, [process for _, process in working])
            victim = draw.randrange(len(working))
            version, process = working[victim]
            process.send_signal(signal.SIGKILL)
            assert process.wait(PATIENCE) == -signal.SIGKILL, crowd.said()
            killed += 1
            working[victim] = (version, crowd.start(version, "work", version))
        for process in publishing:
            assert process.wait(PATIENCE) == 0, crowd.said()
        asyncio.run(until_idle(urls["new"]))
        for _, process in working:
            process.send_signal(signal.SIGTERM)
            # One that was started last may not have begun.
            assert process.wait(PATIENCE) in {0, -signal.SIGTERM}, crowd.said()
        check(urls["new"], crowd.books, publishers, killed)
        assert {line.partition(" ")[2] for line in crowd.books.read("acked")} == set(workers)


async def until_idle(url: str) -> None:
    backend = open_backend(url)

    async def is_idle() -> bool:
        stats = await backend.stats(mixed_programs.QUEUE)
        return not (stats.ready or stats.leased or stats.delayed)

    await wait_until(is_idle, PATIENCE)
    await backend.aclose()


async def ended(url: str, state: State) -> dict[str, str]:
    """Names of the messages that ended so, by their ids."""
    backend = open_backend(url)
    found = await list_messages(backend, mixed_programs.QUEUE, Query(state))
    await backend.aclose()
    names = [each.message.body.decode().partition('"args":["')[2].partition('"')[0] for each in found]
    names = [name or each.message.body.decode() for name, each in zip(names, found, strict=True)]
    assert len({each.message.id for each in found}) == len(found)
    return {each.message.id: name for name, each in zip(names, found, strict=True)}


def check(url: str, books: Books, publishers: list[str], killed: int) -> None:
    published = Counter(books.read("published"))
    assert published == Counter(f"{version}-{number}" for version in publishers for number in range(COUNT))
    done, failed = asyncio.run(ended(url, State.DONE)), asyncio.run(ended(url, State.FAILED))
    # Each has ended, in one way, once.
    assert Counter([*done.values(), *failed.values()]) == published
    assert set(failed.values()) == {name for name in published if int(name.rpartition("-")[2]) % 50 == 7}
    for book, there in (("acked", done), ("failed", failed)):
        told = Counter(line.partition(" ")[0] for line in books.read(book))
        assert [name for name, times in told.items() if times > 1] == [], f"{book} twice"
        assert set(told) <= set(there)
    # What ran again had one more try: it was held by a worker that was killed, or was to be tried again.
    runs = Counter(books.read("run"))
    assert [run for run, times in runs.items() if times > 1] == [], "ran again, and its tries do not tell"
    again = sum(runs.values()) - len(published) - sum(int(name.rpartition("-")[2]) % 10 == 3 for name in published)
    assert again <= killed * mixed_programs.CONCURRENCY
