"""The shares of a worker's queues: weights, a strict order, and limits for single queues."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qworker import Tasks
from qworker.errors import UsageError
from qworker.message import Draft, Message
from qworker.queue_share import QueueShare, parse_queue_share
from qworker.testing.wait_until import wait_until
from qworker.worker import Worker, WorkerOptions
from qworker.worker.shares import Shares


@pytest.fixture
async def tasks_in_memory() -> AsyncIterator[Tasks]:
    tasks = Tasks(f"memory:{secrets.token_hex(8)}")
    yield tasks
    await tasks.aclose()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("high", QueueShare("high")),
        ("high:6", QueueShare("high", 6)),
        ("hooks=5", QueueShare("hooks", concurrency=5)),
        ("hooks:1=5", QueueShare("hooks", 1, 5)),
        # A queue of another program.
        ("a:b", QueueShare("a:b")),
        ("a:b:2=3", QueueShare("a:b", 2, 3)),
        ("a:5:1", QueueShare("a:5", 1)),
    ],
)
def test_a_queue_is_written_with_its_weight_and_its_concurrency(text: str, expected: QueueShare) -> None:
    assert parse_queue_share(text) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("high:0", "-Q high:0: the weight must be at least 1 (got 0)"),
        ("high:-1", "-Q high:-1: the weight must be at least 1 (got -1)"),
        ("hooks=0", "-Q hooks=0: the concurrency must be at least 1 (got 0)"),
        ("hooks=x", "-Q hooks=x: write NAME, NAME:WEIGHT, NAME=CONCURRENCY or NAME:WEIGHT=CONCURRENCY"),
        ("hooks=1:5", "-Q hooks=1:5: write NAME, NAME:WEIGHT, NAME=CONCURRENCY or NAME:WEIGHT=CONCURRENCY"),
    ],
)
def test_a_wrong_share_is_refused_in_one_line(text: str, error: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_queue_share(text)
    assert str(refused.value) == error


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"queues": ("a", "a")}, "queue a is named twice"),
        ({"strict": True}, "a strict order needs the names of the queues"),
        ({"queues": (QueueShare("a", 2), "b"), "strict": True}, "a strict order has no weights"),
        ({"strict": 1}, "strict must be True or False"),
        ({"queues": "mail"}, r"queues must be a tuple of names, such as \('mail',\) \(got 'mail'\)"),
        ({"queues": QueueShare("mail")}, "queues must be a tuple of names"),
    ],
)
def test_queues_that_do_not_fit_together_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        WorkerOptions(**options)


# -- shares ------------------------------------------------------------------------------------------------------------


def deal(shares: Shares, room: int, waiting: dict[str, int]) -> dict[str, int]:
    """Lease once as the feeder does."""
    turn, taken = shares.begin(room, ()), Counter[str]()
    having_more: list[str] = []
    for amount, queues in ((turn.share, turn.queues), (turn.rest, having_more)):
        for queue in tuple(queues):
            wanted = amount(queue, room - taken.total())
            if wanted > 0:
                found = min(wanted, waiting[queue])
                waiting[queue] -= found
                taken[queue] += found
                turn.took(queue, wanted, found)
                if found == wanted:
                    having_more.append(queue)
    return taken


@pytest.mark.parametrize("room", [1, 2, 7, 10, 100])
def test_shares_follow_the_weights_however_little_room_there_is(room: int) -> None:
    shares = Shares([QueueShare("low", 1), QueueShare("mid", 3), QueueShare("high", 6)], set(), strict=False)
    waiting = {"low": 10**6, "mid": 10**6, "high": 10**6}
    taken = Counter[str]()
    for _ in range(1000):
        dealt = deal(shares, room, waiting)
        assert sum(dealt.values()) == room
        taken.update(dealt)
    for queue, weight in (("low", 1), ("mid", 3), ("high", 6)):
        assert abs(taken[queue] - room * 100 * weight) <= 3


def test_an_empty_queue_leaves_its_share_to_the_others_and_saves_nothing() -> None:
    shares = Shares([QueueShare("a", 1), QueueShare("b", 1)], set(), strict=False)
    waiting = {"a": 10**6, "b": 0}
    assert deal(shares, 10, waiting) == {"a": 10, "b": 0}
    for _ in range(100):
        deal(shares, 10, waiting)
    waiting["b"] = 10**6
    taken = Counter[str]()
    for _ in range(4):
        taken.update(deal(shares, 10, waiting))
    assert abs(taken["a"] - taken["b"]) <= 4


# -- the worker --------------------------------------------------------------------------------------------------------


async def fill(app: Any, **counts: int) -> None:
    for queue, count in counts.items():
        await app.store.publish(queue, [Draft(body=b"") for _ in range(count)])


def record(app: Any, *queues: str) -> list[str]:
    """Register raw handlers that record their queue."""
    seen: list[str] = []

    def register(queue: str) -> None:
        @app.raw_handler(queue=queue)
        async def handle(message: Message) -> None:
            seen.append(queue)

    for queue in queues:
        register(queue)
    return seen


async def test_a_worker_starts_messages_by_the_weights_of_their_queues(app) -> None:
    seen = record(app, "high", "low")
    await fill(app, low=140, high=140)
    await app.burst(queues=(QueueShare("low"), QueueShare("high", 6)), concurrency=1)
    assert len(seen) == 280
    assert 115 <= seen[:140].count("high") <= 125
    assert seen[-100:] == ["low"] * 100


async def test_without_weights_each_queue_has_the_same_share(app) -> None:
    seen = record(app, "high", "low")
    await fill(app, low=40, high=40)
    await app.burst(queues=("high", "low"), concurrency=1)
    assert 18 <= seen[:40].count("high") <= 22


async def test_a_strict_order_starts_a_queue_only_if_those_in_front_are_empty(app) -> None:
    seen = record(app, "high", "mid", "low")
    await fill(app, low=20, mid=20, high=20)
    await app.burst(queues=("high", "mid", "low"), strict=True, concurrency=7)
    assert seen == ["high"] * 20 + ["mid"] * 20 + ["low"] * 20


async def test_a_slow_queue_with_a_limit_leaves_the_other_consumers_free(app) -> None:
    gate, running = asyncio.Event(), 0
    most = 0

    @app.raw_handler(queue="hooks")
    async def hook(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    seen = record(app, "high")
    await fill(app, hooks=50)
    async with app.working(queues=("high", QueueShare("hooks", concurrency=5)), concurrency=10) as (worker, _):
        await wait_until(lambda: running == 5)
        await fill(app, high=100)
        await wait_until(lambda: len(seen) == 100)
        assert running == most == 5
        assert (await app.store.stats("hooks")).ready == 45
        gate.set()
        # Each end makes room at once, although the worker waits for messages of the other queue.
        async with asyncio.timeout(20):
            await wait_until(lambda: worker.counts.acked == 150)
    assert most == 5


async def test_a_single_queue_can_have_a_limit(app) -> None:
    gate, running = asyncio.Event(), 0

    @app.raw_handler(queue="hooks")
    async def hook(message: Message) -> None:
        nonlocal running
        running += 1
        await gate.wait()

    await fill(app, hooks=20)
    async with app.working(queues=(QueueShare("hooks", concurrency=3),)) as (worker, _):
        await wait_until(lambda: running == 3)
        assert (await app.store.stats("hooks")).ready == 17
        gate.set()
        await wait_until(lambda: worker.counts.acked == 20)


async def test_a_handler_that_waits_for_a_job_of_its_queue_does_not_keep_it_from_running(tasks_in_memory) -> None:
    @tasks_in_memory.task(queue="q", result=60)
    async def child() -> int:
        return 7

    @tasks_in_memory.task(queue="q", result=60)
    async def parent() -> int:
        return await (await child.enqueue()).result(timeout=30)

    job = await parent.enqueue()
    worker = Worker(tasks_in_memory, WorkerOptions(queues=(QueueShare("q", concurrency=1),), burst=True))
    async with asyncio.timeout(40):
        assert await worker.run()
    assert await job.result(timeout=1) == 7
