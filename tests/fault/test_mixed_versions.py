"""Processes of commit 31528ec and of today share a queue and die: no message is lost or acked twice."""

from __future__ import annotations

import asyncio
import json
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
from qworker.message import Draft, Query, SettleAction, Settlement, State
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
        "import qworker, qworker_file, qworker_redis as r; print(qworker.__file__, qworker_file.__file__, r.__file__)\n"
        "assert qworker.__version__ == '0.1.0'"
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


# The program as it was, with the visibility timeout of today's.
OLD_PROGRAM = f"""
import sys
# Nothing is written beside it, and nothing is imported from the directory of this process.
sys.dont_write_bytecode = True
sys.path[0] = {str(FOLDER)!r}
import program
program.VISIBILITY = {mixed_programs.VISIBILITY}
program.main(*sys.argv[1:])
"""


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
        source = ["-c", OLD_PROGRAM] if version == "old" else [mixed_programs.__file__]
        command = [sys.executable, *source, program, self._urls[version], str(self.ledger), *map(str, rest)]
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


def test_mixed_versions_workers_are_upgraded_and_downgraded_one_after_another(
    old: dict[str, str], urls: dict[str, str], tmp_path: Path
) -> None:
    """As docs/howto/upgrade.md says. Each worker drains while the next one works, and nothing runs again."""
    turns = [("old", "before"), ("new", "upgraded"), ("old", "back")]
    with ExitStack() as stack:
        crowd = Crowd(old, urls, tmp_path, stack)
        workers: list[subprocess.Popen[bytes]] = []
        for turn, (version, name) in enumerate(turns):
            workers.append(crowd.start(version, "work", version))
            for predecessor in workers[:-1]:
                # It may still lease some of what follows.
                predecessor.send_signal(signal.SIGTERM)
            ledger = mixed_programs.Ledger(crowd.ledger)
            asyncio.run(mixed_programs.publish(urls["new"], ledger, COUNT, name))
            assert [predecessor.wait(PATIENCE) for predecessor in workers[:-1]] == [0] * turn, crowd.said()
            # One of 50 fails.
            crowd.until_acked((turn + 1) * (COUNT - COUNT // 50), workers[-1:])
        asyncio.run(until_idle(urls["new"]))
        workers[-1].send_signal(signal.SIGTERM)
        assert workers[-1].wait(PATIENCE) == 0, crowd.said()
    check(urls["new"], crowd.books, [name for _, name in turns], killed=0)
    done = asyncio.run(ended(urls["new"], State.DONE))
    acked = [line.split() for line in crowd.books.read("acked")]
    by = Counter((done[message_id].partition("-")[0], version) for message_id, version in acked)
    assert {(name, version) for version, name in turns} <= by.keys()


# Leases all messages with the code of 31528ec, and ends each lease as the body says. Prints each lease.
OLD_STEPS = """
import asyncio, json, sys
from qworker.message import Settle, Settlement
from qworker.registry import open_backend

async def main(url):
    backend = open_backend(url)
    await backend.open()
    seen, turn = [], {}
    for _ in range(5):
        await backend.reap("mixed")
        for lease in await backend.lease("mixed", 100, 30.0):
            message = lease.message
            word = message.body.decode()
            turn[word] = turn.get(word, 0) + 1
            seen.append([word, message.tries])
            hows = {"acked": "ack", "retried": "fail_tmp", "failed": "fail_perm", "released": "release"}
            how = "ack" if word == "retried" and turn[word] > 1 else hows[word]
            delay = 600.0 if word == "released" else 0.0
            refused = await backend.settle([Settlement(lease=lease, how=Settle(how), delay=delay, error="no")])
            assert refused == [], refused
    await backend.aclose()
    print(json.dumps(seen))

asyncio.run(main(sys.argv[1]))
"""


async def make_suspects(url: str, *bodies: str) -> None:
    """Publish messages, each with three attempts that ended with a death."""
    backend = open_backend(url)
    await backend.publish(mixed_programs.QUEUE, [Draft(body=body.encode(), id=f"given:{body}") for body in bodies])
    for _ in range(3):
        await backend.reap(mixed_programs.QUEUE)
        leases = await backend.lease(mixed_programs.QUEUE, 100, 30.0)
        assert len(leases) == len(bodies)
        died = [Settlement(lease=one, action=SettleAction.FAIL_TMP, died=True, error="died") for one in leases]
        assert await backend.settle(died) == []
    await backend.reap(mixed_programs.QUEUE)
    found = await backend.find(mixed_programs.QUEUE, [f"given:{body}" for body in bodies])
    assert [(one.message.tries, one.message.deaths) for one in found] == [(3, 3)] * len(bodies)
    await backend.aclose()


def test_mixed_versions_a_program_of_31528ec_leases_and_settles_suspects(
    old: dict[str, str], urls: dict[str, str], tmp_path: Path
) -> None:
    """A suspect has zeros in front of its tries in a directory, and bits above the flags on Redis."""
    words = ["acked", "retried", "failed", "released"]
    asyncio.run(make_suspects(urls["new"], *words))
    if urls["new"].startswith("file"):
        names = [path.name for part in ("queue", "delay") for path in (tmp_path / "spool" / "mixed" / part).iterdir()]
        assert len([name for name in names if "_0003" in name]) == 4
    command = [sys.executable, "-c", OLD_STEPS, urls["old"]]
    ended = subprocess.run(command, env=old, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ran = Counter((word, tries) for word, tries in json.loads(ended.stdout))
    assert ran == Counter([*[(word, 3) for word in words], ("retried", 4)])

    async def look() -> dict[str, tuple[State, int, int]]:
        backend = open_backend(urls["new"])
        found = await backend.find(mixed_programs.QUEUE, [f"given:{word}" for word in words])
        await backend.aclose()
        return {one.message.body.decode(): (one.state, one.message.tries, one.message.deaths) for one in found}

    found = asyncio.run(look())
    assert {word: (state, tries) for word, (state, tries, _) in found.items()} == {
        "acked": (State.DONE, 3),
        "retried": (State.DONE, 4),
        "failed": (State.FAILED, 3),
        "released": (State.DELAYED, 3),
    }
    # What was not run is still a suspect.
    assert found["released"][2] == 3


def test_mixed_versions_a_worker_of_31528ec_runs_suspects(
    old: dict[str, str], urls: dict[str, str], tmp_path: Path
) -> None:
    names = [f"new-{number}" for number in range(10)]
    asyncio.run(make_suspects(urls["new"], *names))
    with ExitStack() as stack:
        crowd = Crowd(old, urls, tmp_path, stack)
        worker = crowd.start("old", "work", "old")
        crowd.until_acked(9, [worker])
        asyncio.run(until_idle(urls["new"]))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0, crowd.said()
    assert set(asyncio.run(ended(urls["new"], State.DONE)).values()) == {*names} - {"new-7"}
    assert set(asyncio.run(ended(urls["new"], State.FAILED)).values()) == {"new-7"}
    assert Counter(crowd.books.read("run")) == Counter(f"{name} 3" for name in names)


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
