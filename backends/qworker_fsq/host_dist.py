"""`host-dist`: every item of a queue is enqueued again for each host, and then it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from qworker.backend.scan_source import ProgramOutcome, ScanError
from qworker_fsq.layout import QueueDir, require_queue
from qworker_fsq.requeue_item import link_item, requeue_item
from qworker_fsq.scan import FsqSource, FsqWork

__all__ = ["Distribution", "distribute"]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a distribution.

    Attributes:
        link: Whether to link the same file into every sub-queue, instead of a copy.
        trigger: Whether to pull the trigger of the hosts after each item.
        verbose: Whether to print successes too.
        done: Whether each item leaves the queue.
    """

    link: bool = False
    trigger: bool = False
    verbose: bool = False
    done: bool = True


def distribute(
    root: int, queue: str, hosts: Sequence[str], source: FsqSource, how: Distribution, say: Callable[[str], None]
) -> int:
    """Enqueue each item for every host and return the exit status.

    An item is done when all hosts have it. If the process is killed before, the next run skips the hosts that have it.

    Args:
        root: The root's descriptor.
        queue: The queue's name.
        hosts: The hosts. Empty: all hosts of the queue.
        source: The source of the items.
        how: The options of the distribution.
        say: Prints a line.

    Raises:
        QueueNotFound: The queue or a sub-queue does not exist.
    """
    constants = source.constants
    targets = [require_queue(root, queue, constants)]
    try:
        base = targets[0]
        chosen = list(hosts) or base.host_names()
        if not chosen:
            say(f"{queue} has no hosts: add one with `qworker fsq add-host URL HOST {queue}`")
            return source.exits.fail_tmp
        targets += [require_queue(root, queue, constants, host) for host in chosen]
        for work in source.work(say):
            _distribute(work, targets[1:], how, say)
            if how.trigger:
                base.pull_trigger(constants.hosts_trigger)
    except ScanError as error:
        say(str(error))
        return source.exits.fail_tmp
    finally:
        for files in targets:
            files.close()
    return 0


def _distribute(work: FsqWork, targets: Sequence[QueueDir], how: Distribution, say: Callable[[str], None]) -> None:
    name, claimed = work.name, work.claimed
    ended, reason = ProgramOutcome.SUCCESS, "succeeded"
    try:
        body = b"" if how.link else claimed.read()
        for target in targets:
            if how.link:
                link_item(claimed, target)
            else:
                requeue_item(target, name, body)
    except OSError as error:
        ended, reason = ProgramOutcome.FAIL_TMP, f"cannot reenqueue: {error.strerror}"
    if not how.done:
        work.leave()
        return
    instead = work.end(ended, reason)
    if instead is not None or ended is not ProgramOutcome.SUCCESS or how.verbose:
        say(instead or f"{name}: {reason}")
