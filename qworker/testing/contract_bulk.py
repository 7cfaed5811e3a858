"""The contract of bulk writes: the staged messages of a load become visible all together once, or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

from qworker import bulk
from qworker.bulk import BulkWriter, StagedPartition
from qworker.message import Draft
from qworker.testing.base import Contract
from qworker.testing.harness import Case

__all__ = ["BulkContract"]

_PARTS, _ROWS = 2, 30
_ALL = sorted(b"%d.%d" % (partition, row) for partition in range(_PARTS) for row in range(_ROWS))


async def _stage(writer: BulkWriter, run: str) -> list[StagedPartition]:
    return [
        await writer.stage(run, partition, "only", [[Draft(body=b"%d.%d" % (partition, row)) for row in range(_ROWS)]])
        for partition in range(_PARTS)
    ]


class BulkContract(Contract):
    """The tests of `qworker.bulk.open` and `incomplete_loads`."""

    async def test_staged_messages_are_seen_at_the_commit_and_once(self, case: Case, tmp_path: Path) -> None:
        writer = bulk.open(case.backend, case.queue, "job", folder=tmp_path)
        partitions = await _stage(writer, "run")
        assert await case.lease(1) == []
        assert (await writer.commit(0, partitions)).rows == len(_ALL)
        assert sorted(await case.leased_bodies()) == _ALL

    async def test_a_load_that_is_done_is_never_published_again(self, case: Case, tmp_path: Path) -> None:
        for run in ("first", "again"):
            writer = bulk.open(case.backend, case.queue, "job", folder=tmp_path)
            await writer.commit(0, await _stage(writer, run))
        assert sorted(await case.leased_bodies()) == _ALL

    async def test_a_discarded_run_is_never_seen(self, case: Case, tmp_path: Path) -> None:
        writer = bulk.open(case.backend, case.queue, "job", folder=tmp_path)
        await _stage(writer, "run")
        await writer.discard("run")
        assert await case.lease(1) == []
        assert await writer.done(0) is None

    async def test_an_incomplete_load_is_found_until_it_is_completed(self, case: Case, tmp_path: Path) -> None:
        dead = bulk.open(case.backend, case.queue, "job", folder=tmp_path)
        partitions = await _stage(dead, "dead")
        other = await case.open()
        assert await bulk.incomplete_loads(other, case.queue, folder=tmp_path) == []
        manifest = await dead.seal(0, partitions)
        [half] = await bulk.incomplete_loads(other, case.queue, folder=tmp_path)
        assert (half.name, half.manifest) == ("job", manifest)
        assert case.queue in await other.queues()
        await bulk.open(other, case.queue, "job", folder=tmp_path).publish(half.manifest)
        assert await bulk.incomplete_loads(other, case.queue, folder=tmp_path) == []

    async def test_the_first_seal_counts_and_anybody_publishes_it(self, case: Case, tmp_path: Path) -> None:
        dead, others = (
            bulk.open(case.backend, case.queue, "job", folder=tmp_path),
            [await case.open() for _ in range(2)],
        )
        assert await dead.seal(0, await _stage(dead, "dead")) is not None
        writers = [bulk.open(other, case.queue, "job", folder=tmp_path) for other in others]
        late = [
            await writer.stage(f"late-{number}", 0, "a", [[Draft(body=b"late")]])
            for number, writer in enumerate(writers)
        ]
        await asyncio.gather(*[writer.commit(0, [partition]) for writer, partition in zip(writers, late, strict=True)])
        assert sorted(await case.leased_bodies()) == _ALL
