"""What an app does not use leaves nothing in the store: no directory, no key and no subscription."""

from __future__ import annotations

from pathlib import Path

from redis import Redis

from qworker import Draft, Fail, Tasks
from qworker.message import State
from qworker.retry import Backoff
from qworker.worker import Worker, WorkerOptions
from qworker_redis.keys import PARTS
from tests.support.apps import close_app
from tests.support.servers import RedisServer, free_port

QUEUE = "work"


async def use_all_but_the_features(url: str) -> None:
    """Run messages of every end: acked, retried, failed by its handler, and delayed."""
    tasks = Tasks(url)
    runs: list[int] = []

    @tasks.task(queue=QUEUE, max_tries=2, retry=Backoff(initial=0.0, maximum=0.0))
    async def step(number: int) -> int:
        runs.append(number)
        if number == 1 and runs.count(1) == 1:
            raise RuntimeError("again")
        if number == 2:
            raise Fail("for good")
        return number

    @tasks.task(queue=QUEUE)
    def in_thread(number: int) -> int:
        runs.append(number)
        return number

    jobs = await tasks.enqueue_many([*map(step.call, range(3)), in_thread.call(3)])
    await step.using(delay=3600).enqueue(4)
    backend = await tasks.backend()
    await backend.publish(QUEUE, [Draft(body=b'{"task":"step","args":[5]}')])
    assert await Worker(tasks, WorkerOptions(burst=True)).run()
    assert sorted(runs) == [0, 1, 1, 2, 3, 5]
    assert [one.state for one in await backend.find(QUEUE, [job.id for job in jobs])] == [State.FAILED]
    await close_app(tasks)


async def test_a_directory_has_none_of_the_directories_of_unused_features(tmp_path: Path) -> None:
    await use_all_but_the_features(f"file://{tmp_path}/spool?sync=off")
    spool = tmp_path / "spool"
    assert {path.name for path in spool.iterdir()} == {QUEUE, ".history"}
    names = sorted(path.name for path in (spool / QUEUE).iterdir() if path.is_dir())
    assert names == ["delay", "done", "fail", "lease", "names", "queue", "tmp", "workers"]


async def test_a_redis_has_none_of_the_keys_of_unused_features() -> None:
    with RedisServer(port=free_port()) as server:
        await use_all_but_the_features(server.url)
        with Redis.from_url(server.url) as client:
            keys = {bytes(key).decode() for key in client.scan_iter()}
            parts = {part for key in keys if (part := key.partition(f"{{qworker:{QUEUE}}}:")[2]) in PARTS}
            # `wake` is there until a worker has taken it.
            parts.discard("wake")
            assert sorted(parts) == ["claims", "delayed", "errors", "fail", "history", "leased", "meta", "msg"]
            # Callers who wait for results subscribe, and so does the worker for them.
            assert client.pubsub_channels() == [], client.info("commandstats").keys()
