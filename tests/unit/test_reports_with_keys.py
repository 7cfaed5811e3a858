"""Reports of failures whose task has a unique key: another report can be there already."""

from __future__ import annotations

from qworker import Fail, FailedCall, Tasks, Unique
from qworker.worker import Worker, WorkerOptions


async def test_a_report_that_is_not_stored_because_of_its_key_is_not_counted_as_stored() -> None:
    tasks = Tasks("memory://reports-with-keys")

    @tasks.task(queue="alerts", unique=Unique(key="one"))
    async def alert(failed: FailedCall) -> None: ...

    @tasks.task(on_failure=alert)
    async def work() -> None:
        raise Fail("no")

    backend = await tasks.backend()
    await backend.create("alerts")
    for _ in range(2):
        await work.enqueue()
    worker = Worker(tasks, WorkerOptions(burst=True, queues=("default",)))
    await worker.run()
    (counts,) = worker.features.counts()
    assert counts.features == {"failure_reports": {"stored": 1, "existed": 1}}
    for queue in ("default", "alerts"):
        await backend.delete(queue)
    await tasks.aclose()
