"""The exchange that replaces a waiting message in a directory, explored completely: kills of the publisher anywhere.

W waits, N replaces it, a worker runs what waits, and another publisher of the key keeps out, or stores T if the key is
free. A state is what is on the disk, and where each process is. See docs/reference/file-format.md, "Unique keys".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Broken", "Rules", "explore"]

# The names at which a file waits: before, after, and when a worker has moved it back.
WAITING = ("old", "new", "back")


class Rules(NamedTuple):
    """What a version of the protocol does."""

    # Whether the new file takes a name only if there is a file. Otherwise it is a plain rename.
    exchanges: bool = True
    # Whether a worker compares the file that it has opened with the one that it has leased.
    compares_files: bool = True
    # Whether the new file has its second link before the exchange.
    links_before: bool = True


class World(NamedTuple):
    """The disk: the file at each name, and the one that the link of the id names; and each process."""

    old: str | None = "W"
    new: str | None = None
    back: str | None = None
    lease: str | None = None
    swap: str | None = None
    has_next: bool = False
    link: str = "W"
    lock: bool = False
    # Of the publisher of N, of the worker, and the file and the name that the worker has opened.
    step: str = "start"
    working: str = "idle"
    opened: tuple[str, str] = ("", "")
    ran: frozenset[str] = frozenset()
    # Whether N is a message of its own, because W ran; and whether T was stored.
    is_alone: bool = False
    is_other_stored: bool = False

    def is_pending(self, file: str) -> bool:
        """Return whether a file waits or is leased."""
        return file in (self.old, self.new, self.back, self.lease)


class Broken(AssertionError):
    """A message is lost, or two have the key."""


def explore(rules: Rules) -> int:
    """Visit every state and return their number.

    Raises:
        Broken: A state breaks the promise.
    """
    seen, todo = {World()}, [World()]
    while todo:
        world = todo.pop()
        check(world)
        if world.is_other_stored:
            continue
        for after in {*publish(world, rules), *work(world, rules), *publish_other(world)} - seen:
            seen.add(after)
            todo.append(after)
    return len(seen)


def check(world: World) -> None:
    """Check a state."""
    pending = [file for file in "WN" if world.is_pending(file)]
    if (len(pending) == 2 and not world.is_alone) or (pending and world.is_other_stored):
        raise Broken(f"two are pending: {world}")
    if world.working == "idle" and world.step in {"done", "dead"}:
        safe = {*pending, *world.ran}
        if not safe or (world.step == "done" and "N" not in safe):
            raise Broken(f"one is lost: {world}")


def publish(world: World, rules: Rules) -> Iterator[World]:
    """The next step of the publisher of N, or its death."""
    if world.step in {"done", "dead"}:
        return
    if world.step != "start":
        yield replace(world, rules)
        yield world._replace(step="dead", lock=False)
    elif not world.lock and world.old == "W":
        yield world._replace(step="swap", lock=True)
    elif not world.lock:
        # W runs, or has run.
        yield world._replace(step="done", new="N", link="N", is_alone=True)


def replace(world: World, rules: Rules) -> World:
    """The next step of the exchange, which has the lock."""
    match world.step:
        case "swap":
            return world._replace(step="next", swap="N")
        case "next":
            return world._replace(step="rename", has_next=rules.links_before)
        case "rename" if world.old:
            return world._replace(step="exchange", old=None, new="W")
        case "exchange" if not rules.exchanges:
            return world._replace(step="link", new="N", swap=None, link="N")
        case "exchange" if world.new:
            return world._replace(step="link", new=world.swap, swap=world.new)
        case "link":
            return link(world, may_know=True)._replace(step="remove")
        case "remove":
            return world._replace(step="done", swap=None, lock=False)
        case _:
            # There is no file any more: nothing has happened.
            return world._replace(step="start", swap=None, has_next=False, lock=False)


def link(world: World, *, may_know: bool) -> World:
    """Let the link of the id follow an exchange that has happened, if the new file is known."""
    if world.swap == world.link and (world.has_next or may_know):
        return world._replace(link="N", has_next=False)
    return world._replace(has_next=False)


def publish_other(world: World) -> Iterator[World]:
    """Another publisher of the key finishes what a dead one has begun, and stores T if the key is free."""
    if world.lock:
        return
    finished = link(world, may_know=False)._replace(swap=None)
    yield finished._replace(is_other_stored=not finished.is_pending(finished.link))


def work(world: World, rules: Rules) -> Iterator[World]:
    """The next step of the worker."""
    file, name = world.opened
    if world.working == "idle":
        for place in WAITING:
            if found := getattr(world, place):
                yield world._replace(working="opened", opened=(found, place))
    elif world.working == "opened":
        leased = getattr(world, name)
        moved = world._replace(**{name: None, "lease": leased}) if leased else world
        yield moved._replace(working="leased" if leased else "idle")
    elif world.lease != file and rules.compares_files:
        yield world._replace(working="idle", back=world.lease, lease=None)
    else:
        yield world._replace(working="idle", lease=None, ran=world.ran | {file})
