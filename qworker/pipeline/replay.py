"""`replay`: run failed messages again, or archived ones, that an SQL predicate chooses.

From a queue: failed messages are requeued there, in one atomic step for each message. A replay that dies is run again, and finds
only the failed messages that are left.

From an archive: a message may be anywhere by now, or nowhere. What is to be done with each is written down beside the archive before
anything is done (a plan), and a replay that dies is resumed from its plan and from nothing else: what it requeues is either still in
failed or was requeued, and what it enqueues is one exactly-once write under the plan's name. No plan takes a message that an earlier one
of the same name has.
"""

from __future__ import annotations

import hashlib

import msgspec
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from qworker.bulk import check_load
from qworker.errors import UsageError
from qworker.message import State
from qworker.pipeline import hands
from qworker.pipeline.inputs import live
from qworker.pipeline.lives import first_line
from qworker.pipeline.plans import ENQUEUE, REQUEUE, Plans, archived_choice, matching
from qworker.pipeline.report.points import error_kind

__all__ = ["Chosen", "ReplayResult", "replay"]

_SHOWN = 20


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay does with the messages of one task and error."""

    # `requeue`, `enqueue`; or `skip` with the reason: `pending`, `done since` or `replayed before`.
    act: str
    task: str | None
    # One of them.
    error: str | None
    messages: int


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay did; in a dry run, what it would do."""

    queue: str
    dry_run: bool
    # The name under which it can be resumed; None for one of a queue, which needs none.
    name: str | None
    # Messages that the predicate chose.
    matched: int
    # Made ready again in the queue, and enqueued anew from the archive.
    requeued: int
    enqueued: int
    skipped: int
    # The most frequent kinds.
    chosen: list[Chosen]


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
        spark: the session.
        url: the backend.
        queue: its queue, and the archive's.
        predicate: SQL over the columns of MESSAGES, such as `task = 'thumb' and error like '%Timeout%'`.
        archive: also what this archive has; None: failed messages.
        state: `failed`, or `done` to run again what succeeded; only of an archive.
        name: the name of a replay from an archive: each archived message is replayed once under it. None makes one of the queue, the
            predicate and the state.
        dry_run: change nothing, and tell what would be done.

    Raises:
        UsageError: the predicate is refused, or done messages of a queue are asked for.
    """
    if archive is None:
        if state != State.FAILED.word:
            raise UsageError("done messages can be replayed only from an archive: name one with --archive")
        return _replay_queue(spark, url, queue, predicate, dry_run=dry_run)
    stored = State.of_word(state).value
    name = check_load(name or _replay_name(queue, predicate, stored))
    plans = Plans(spark, archive, queue, name)
    run = plans.unfinished()
    if run is not None and not dry_run:
        # What the replay that died had decided: nothing is decided anew.
        result = _told(plans.planned(run), queue, name, dry_run=False)
        _carry_out(plans, run, url, result)
        return result
    chosen = archived_choice(plans, url, predicate, stored).persist()
    try:
        result = _told(chosen, queue, name, dry_run=dry_run)
        if dry_run or not (result.requeued or result.enqueued):
            return result
        _carry_out(plans, plans.write(chosen), url, result)
    finally:
        chosen.unpersist()
    return result


def _replay_queue(spark: SparkSession, url: str, queue: str, predicate: str, *, dry_run: bool) -> ReplayResult:
    failed = live(spark, url, "messages", [queue], states=(State.FAILED.value,))
    chosen = matching(failed, predicate).select("id", "task", "error", F.lit(REQUEUE).alias("act")).persist()
    try:
        result = _told(chosen, queue, None, dry_run=dry_run)
        if dry_run or not result.matched:
            return result
        return msgspec.structs.replace(result, requeued=hands.requeue(chosen, url, queue))
    finally:
        chosen.unpersist()


def _carry_out(plans: Plans, run: int, url: str, wanted: ReplayResult) -> None:
    """Do what a plan says, all of it once, and write down that it is done."""
    planned = plans.planned(run)
    if wanted.requeued:
        hands.requeue(planned.where(F.col("act") == REQUEUE), url, plans.queue)
    if wanted.enqueued:
        bodies = plans.bodies(planned.where(F.col("act") == ENQUEUE))
        options = {"url": url, "queue": plans.queue, "load": f"{plans.name}.{run}"}
        bodies.write.format("qworker").mode("append").options(**options).save()
    plans.finish(run)


def _told(chosen: DataFrame, queue: str, name: str | None, *, dry_run: bool) -> ReplayResult:
    """The counts of what is chosen, and its most frequent kinds: for each act some, so that one look tells of all acts."""
    line = first_line("error")
    kinds = chosen.groupBy("act", "task", error_kind(line).alias("kind")).agg(
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
            Chosen(act=row["act"], task=row["task"], error=row["error"] or None, messages=row["messages"])
            for row in sorted(rows, key=lambda row: -row["messages"])[:_SHOWN]
        ],
    )


def _replay_name(queue: str, predicate: str, state: str) -> str:
    # Of the stored word: a load of the same name has been begun by an earlier release.
    digest = hashlib.sha256("\0".join((queue, predicate, state)).encode()).hexdigest()
    return f"replay-{digest[:12]}"
