"""`replay`: run failed or archived messages again that an SQL predicate selects.

From a queue: failed messages are requeued, in one atomic step for each message. If a replay dies, run it again: it
finds only the remaining failed messages.

From an archive: a message can be in any state now, or not stored. A plan for each message is written next to the
archive before anything is done. If a replay dies, the next one continues its plan: a message of the plan is still
failed or was requeued, and enqueueing is one exactly-once write under the plan's name. No plan contains a message that
an earlier plan of the same name has.
"""

from __future__ import annotations

import hashlib

import msgspec
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from qworker.bulk import check_load
from qworker.errors import UsageError
from qworker.message import State
from qworker.pipeline.inputs import read_live
from qworker.pipeline.jobs import bulk_calls
from qworker.pipeline.jobs.replay_plan import ENQUEUE, REQUEUE, ReplayPlans, select_archived, select_matching
from qworker.pipeline.report.event_points import normalize_error
from qworker.pipeline.timelines import first_line

__all__ = ["ReplayResult", "ReplaySelection", "replay"]

_SHOWN = 20


class ReplaySelection(msgspec.Struct, frozen=True, kw_only=True):
    """The action of a replay for the messages of one task and error.

    Attributes:
        act: `requeue`, `enqueue`, or `skip` with the reason: `pending`, `done since` or `replayed before`.
        task: The task.
        error: The error of one of the messages.
        messages: The number of the messages.
    """

    act: str
    task: str | None
    error: str | None
    messages: int


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay. In a dry run: what it would do.

    Attributes:
        queue: The queue.
        dry_run: Whether nothing was changed.
        name: The name under which it can be continued; None for a replay from a queue, which needs no name.
        matched: The number of messages that the predicate selected.
        requeued: The number of failed messages that were requeued.
        enqueued: The number of messages that were enqueued again from the archive.
        skipped: The number of the other messages.
        chosen: The most frequent tasks and errors.
    """

    queue: str
    dry_run: bool
    name: str | None
    matched: int
    requeued: int
    enqueued: int
    skipped: int
    chosen: list[ReplaySelection]


def replay(
    spark: SparkSession,
    url: str,
    queue: str,
    predicate: str,
    *,
    archive: str | None = None,
    state: str = "failed",
    name: str | None = None,
    dry_run: bool = False,
) -> ReplayResult:
    """Run messages again.

    Args:
        spark: The session.
        url: The backend.
        queue: The name of the queue, also in the archive.
        predicate: SQL over the columns of MESSAGES, such as `task = 'thumb' and error like '%Timeout%'`.
        archive: Select from this archive. None: from the failed messages of the queue.
        state: `failed`, or `done` to run acked messages again. Only with an archive.
        name: The name of a replay from an archive. Each archived message is replayed once under a name. None: a name
            made from the queue, the predicate and the state.
        dry_run: Change nothing, and return what would be done.

    Raises:
        UsageError: The predicate is not valid, or done messages of a queue were requested.
    """
    if archive is None:
        if state != State.FAILED.word:
            raise UsageError("done messages can be replayed only from an archive: name one with --archive")
        return _replay_queue(spark, url, queue, predicate, dry_run=dry_run)
    stored = State.of_word(state).value
    name = check_load(name or _replay_name(queue, predicate, stored))
    plans = ReplayPlans(spark, archive, queue, name)
    run = plans.pending_plan()
    if run is not None and not dry_run:
        # This is the plan of the replay that died: nothing is decided again.
        result = _to_result(plans.read_plan(run), queue, name, dry_run=False)
        _carry_out(plans, run, url, result)
        return result
    chosen = select_archived(plans, url, predicate, stored).persist()
    try:
        result = _to_result(chosen, queue, name, dry_run=dry_run)
        if dry_run or not (result.requeued or result.enqueued):
            return result
        _carry_out(plans, plans.write(chosen), url, result)
    finally:
        chosen.unpersist()
    return result


def _replay_queue(spark: SparkSession, url: str, queue: str, predicate: str, *, dry_run: bool) -> ReplayResult:
    failed = read_live(spark, url, "messages", [queue], states=(State.FAILED.value,))
    chosen = select_matching(failed, predicate).select("id", "task", "error", F.lit(REQUEUE).alias("act")).persist()
    try:
        result = _to_result(chosen, queue, None, dry_run=dry_run)
        if dry_run or not result.matched:
            return result
        return msgspec.structs.replace(result, requeued=bulk_calls.requeue_ids(chosen, url, queue))
    finally:
        chosen.unpersist()


def _carry_out(plans: ReplayPlans, run: int, url: str, wanted: ReplayResult) -> None:
    """Carry out a plan, everything once, and record that it is done."""
    planned = plans.read_plan(run)
    if wanted.requeued:
        bulk_calls.requeue_ids(planned.where(F.col("act") == REQUEUE), url, plans.queue)
    if wanted.enqueued:
        bodies = plans.bodies(planned.where(F.col("act") == ENQUEUE))
        options = {"url": url, "queue": plans.queue, "load": f"{plans.name}.{run}"}
        bodies.write.format("qworker").mode("append").options(**options).save()
    plans.finish(run)


def _to_result(chosen: DataFrame, queue: str, name: str | None, *, dry_run: bool) -> ReplayResult:
    """Count the selected messages, and find the most frequent tasks and errors of each act."""
    line = first_line("error")
    kinds = chosen.groupBy("act", "task", normalize_error(line).alias("kind")).agg(
        F.max(line).alias("error"), F.count("*").alias("messages")
    )
    of_act = Window.partitionBy("act")
    frequent = of_act.orderBy(F.desc("messages"), "task", "kind")
    ranked = kinds.withColumns({"total": F.sum("messages").over(of_act), "nth": F.row_number().over(frequent)})
    rows = ranked.where(F.col("nth") <= _SHOWN).collect()
    counts = {row["act"]: row["total"] for row in rows}
    requeued, enqueued, total = counts.get(REQUEUE, 0), counts.get(ENQUEUE, 0), sum(counts.values())
    return ReplayResult(
        queue=queue,
        dry_run=dry_run,
        name=name,
        matched=total,
        requeued=requeued,
        enqueued=enqueued,
        skipped=total - requeued - enqueued,
        chosen=[
            ReplaySelection(act=row["act"], task=row["task"], error=row["error"] or None, messages=row["messages"])
            for row in sorted(rows, key=lambda row: -row["messages"])[:_SHOWN]
        ],
    )


def _replay_name(queue: str, predicate: str, state: str) -> str:
    # The digest uses the stored word of the state, so that replays of earlier releases keep their names.
    digest = hashlib.sha256("\0".join((queue, predicate, state)).encode()).hexdigest()
    return f"replay-{digest[:12]}"
