"""A model of one given id of `file:`: two publishers, one worker, and a backup made of hard links, which die anywhere.

An instance is one file. A publisher writes it in tmp/, links it under the id, and shows it. The id has one link, one
record of a place, and perhaps a hold. Looking for an instance lists one directory after another, and files move
meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Broken", "IdRules", "IdWorld", "explore_ids", "id_steps", "start_ids"]

# Instances at most.
_COUNT = 4
_VISIBLE = frozenset({"queue", "lease", "delay"})
_LISTED = ("lease", "queue", "delay")


class Broken(AssertionError):
    """A promise that does not hold."""


class IdRules(NamedTuple):
    """The rules of the protocol. Each test breaks one of them.

    Attributes:
        hold: When the hold is written: at the first lease, at the publish, at the ack, or never.
        links_prove: Whether a second link counts as a stored message.
        record_proves: Whether the record counts without a look at the place.
        check_moves: Whether a search counts only if the file was not renamed during it.
    """

    hold: str = ""
    links_prove: bool = False
    record_proves: bool = False
    check_moves: bool = True


class Process(NamedTuple):
    """A publisher or the worker.

    Attributes:
        step: Its next step.
        instance: Its file.
        has_moved: Whether the linked file was renamed since its search began.
        has_listed: Whether it has searched.
    """

    step: str
    instance: int = -1
    has_moved: bool = True
    has_listed: bool = False


class IdWorld(NamedTuple):
    """One state."""

    places: tuple[str, ...]
    # The instances to which a backup has a link.
    kept: frozenset[int]
    link: int | None
    # The instance and its place, as the record says.
    record: tuple[int, str] | None
    held: bool
    lock: int | None
    publishers: tuple[Process, ...]
    worker: Process
    crashes: int
    backups: int
    shown: int
    reported: bool

    def move(self, instance: int, place: str) -> IdWorld:
        """Return the world after a rename."""
        places = (*self.places[:instance], place, *self.places[instance + 1 :])
        moved = tuple([each._replace(has_moved=True) for each in self.publishers]) if instance == self.link else None
        return self._replace(places=places, publishers=moved or self.publishers)

    def publisher(self, number: int, step: str, **changes: Any) -> IdWorld:
        """Return the world after a step of a publisher."""
        changed = self.publishers[number]._replace(step=step, **changes)
        return self._replace(publishers=(*self.publishers[:number], changed, *self.publishers[number + 1 :]))

    @property
    def has_two_links(self) -> bool:
        """True if the link is not the last one of its file."""
        return self.link is not None and (self.places[self.link] != "gone" or self.link in self.kept)


def start_ids(crashes: int, backups: int) -> IdWorld:
    """Return the world before the first publish."""
    begin = Process("start")
    return IdWorld(
        ("none",) * _COUNT, frozenset(), None, None, False, None, (begin, begin), Process("idle"), crashes, backups, 0,
        False,
    )  # fmt: skip


def explore_ids(world: IdWorld, rules: IdRules) -> int:
    """Check every state that can be reached and return their number.

    Raises:
        Broken: A promise does not hold in one of them.
    """
    seen = {world}
    waiting = deque([world])
    while waiting:
        for after in id_steps(waiting.popleft(), rules):
            if after not in seen:
                _check(after, rules)
                seen.add(after)
                waiting.append(after)
    return len(seen)


def _check(world: IdWorld, rules: IdRules) -> None:
    if sum(place in _VISIBLE for place in world.places) > 1:
        raise Broken("stored twice")
    if rules.hold and world.shown > 1:
        raise Broken("shown twice")
    if world.reported and world.shown == 0:
        raise Broken("reported, never shown")


def id_steps(world: IdWorld, rules: IdRules) -> Iterator[IdWorld]:
    """Yield the states after each possible step."""
    for number, publisher in enumerate(world.publishers):
        yield from _publisher_steps(world, rules, number, publisher)
        if world.crashes and publisher.step not in {"start", "done"}:
            died = world.publisher(number, "start", instance=-1, has_moved=True, has_listed=False)
            yield died._replace(lock=None if world.lock == number else world.lock, crashes=world.crashes - 1)
    yield from _worker_steps(world, rules)
    if world.backups and world.link is not None:
        kept = world.kept | {each for each, place in enumerate(world.places) if place not in {"none", "gone"}}
        kept |= {world.link}
        changed = tuple([each._replace(has_moved=True) for each in world.publishers])
        yield world._replace(kept=kept, backups=world.backups - 1, publishers=changed)


# -- publishing --------------------------------------------------------------------------------------------------------


def _publisher_steps(world: IdWorld, rules: IdRules, number: int, publisher: Process) -> Iterator[IdWorld]:
    step, own = publisher.step, publisher.instance
    if step == "start" and "none" in world.places:
        own = world.places.index("none")
        yield world.move(own, "tmp").publisher(number, "lock", instance=own)
    elif step == "lock" and world.lock is None:
        yield world._replace(lock=number).publisher(number, "look")
    elif step == "look":
        yield from _look(world, rules, number, own)
    elif step in _LISTED:
        yield from _list(world, number, step, own)
    elif step == "linked":
        yield world._replace(record=(own, "queue")).publisher(number, "hold" if rules.hold == "publish" else "unlock")
    elif step == "hold":
        yield world._replace(held=True).publisher(number, "unlock")
    elif step == "unlock":
        yield world._replace(lock=None).publisher(number, "show")
    elif step == "show":
        shown = world.move(own, "queue").publisher(number, "reported")
        yield shown._replace(shown=min(world.shown + 1, 2))
    elif step == "reported":
        yield world.publisher(number, "done")._replace(reported=True)


def _look(world: IdWorld, rules: IdRules, number: int, own: int) -> Iterator[IdWorld]:
    """Look at the link under the lock."""
    link, publisher = world.link, world.publishers[number]
    unlocked = world._replace(lock=None)
    if link is None or not world.has_two_links:
        yield _link(world, number, own)
    elif world.places[link] == "tmp":
        if _is_living(world, link):
            yield unlocked.publisher(number, "lock")
        else:
            yield unlocked.move(link, "gone").publisher(number, "lock")
    elif _is_proven(world, rules, link):
        yield _found(unlocked, number, own, link)
    elif publisher.has_moved and (rules.check_moves or not publisher.has_listed):
        # The search starts now, without the lock.
        yield unlocked.publisher(number, _LISTED[0], has_moved=False, has_listed=True)
    else:
        # The search has missed nothing: the message is gone.
        yield _link(world, number, own)


def _is_proven(world: IdWorld, rules: IdRules, link: int) -> bool:
    record = world.record
    if rules.links_prove or (rules.record_proves and record is not None and record[0] == link):
        return True
    return record == (link, world.places[link])


def _link(world: IdWorld, number: int, own: int) -> IdWorld:
    if world.held:
        if not world.shown:
            raise Broken("held, never shown")
        return world._replace(lock=None, link=None).move(own, "gone").publisher(number, "reported")
    # Every search of the earlier link is over.
    changed = tuple([each._replace(has_moved=True) for each in world.publishers])
    return world._replace(link=own, publishers=changed).publisher(number, "linked")


def _list(world: IdWorld, number: int, directory: str, own: int) -> Iterator[IdWorld]:
    """List one directory for the file of the link."""
    link = world.link
    if link is not None and world.places[link] == directory:
        yield _found(world, number, own, link)
        return
    following = {"lease": "queue", "queue": "delay", "delay": "lock"}[directory]
    yield world.publisher(number, following)


def _found(world: IdWorld, number: int, own: int, link: int) -> IdWorld:
    if world.places[link] not in _VISIBLE:
        raise Broken("reported, not stored")
    return world.move(own, "gone").publisher(number, "reported")


def _is_living(world: IdWorld, instance: int) -> bool:
    return any(each.instance == instance and each.step not in {"start", "done"} for each in world.publishers)


# -- working -----------------------------------------------------------------------------------------------------------


def _worker_steps(world: IdWorld, rules: IdRules) -> Iterator[IdWorld]:
    worker = world.worker
    own = worker.instance
    if worker.step == "idle":
        for instance, place in enumerate(world.places):
            if place in {"queue", "delay"}:
                yield world.move(instance, "lease")._replace(worker=Process("held", instance))
            elif place == "lease":
                # The lease of a dead worker ends.
                yield _record(world, instance).move(instance, "delay")
            elif place == "tmp" and not _is_living(world, instance):
                yield world.move(instance, "gone")
        yield from _sweep(world)
    elif worker.step == "held":
        yield world._replace(held=world.held or rules.hold == "lease", worker=Process("run", own))
    elif worker.step == "run":
        yield world.move(own, "gone")._replace(worker=Process("acked", own))
        yield _record(world, own)._replace(worker=Process("retry", own))
    elif worker.step == "retry":
        yield world.move(own, "delay")._replace(worker=Process("idle"))
    elif worker.step == "acked":
        yield world._replace(held=world.held or rules.hold == "ack", worker=Process("free", own))
    elif worker.step == "free" and world.lock is None:
        yield world._replace(link=None if world.link == own else world.link, worker=Process("idle"))
    if world.crashes and worker.step != "idle":
        yield world._replace(worker=Process("idle"), crashes=world.crashes - 1)


def _record(world: IdWorld, instance: int) -> IdWorld:
    return world._replace(record=(instance, "delay"))


def _sweep(world: IdWorld) -> Iterator[IdWorld]:
    if world.lock is None and world.link is not None and not world.has_two_links:
        yield world._replace(link=None)
