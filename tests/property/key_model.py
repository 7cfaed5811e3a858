"""The protocol of unique keys in a directory, explored completely: publishers, requeues, and kills anywhere.

Every message has the same key and belongs to one publisher. A state is what is on the disk, and where each process is.
Leases, retries, failures and acks are single renames, so they are single steps. See
docs/reference/file-format.md, "Unique keys".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Broken", "Rules", "explore"]

TMP, QUEUE, LEASE, FAIL, GONE = "tmp", "queue", "lease", "fail", "gone"
PENDING = (QUEUE, LEASE)


class Rules(NamedTuple):
    """What a version of the protocol does."""

    # Whether a file in tmp/ of a live publisher makes others wait.
    waits_for_publishers: bool = True
    # Whether the key is checked and written under one lock.
    keys_under_lock: bool = True
    # Whether a requeue checks the key and moves the message under the lock.
    requeues_under_lock: bool = True


class State(NamedTuple):
    """The disk: the message that the key names, and the place and the link of each; and each process."""

    key: int | None
    places: tuple[str, ...]
    links: tuple[bool, ...]
    lock: int | None
    # Of the publishers, then of the requeue: where it is.
    steps: tuple[str, ...]


class Broken(AssertionError):
    """Two messages have the key, or a key is taken for ever."""


def explore(publishers: int, rules: Rules) -> int:
    """Visit every state and return their number.

    Raises:
        Broken: A state breaks the promise.
    """
    first = State(None, (TMP,) * publishers, (False,) * publishers, None, (*["start"] * publishers, "idle"))
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        check(state, rules)
        for after in {*publish(state, rules), *requeue(state, rules), *work(state), *kill(state)} - seen:
            seen.add(after)
            todo.append(after)
    return len(seen)


def check(state: State, rules: Rules) -> None:
    """Check a state."""
    if sum(place in PENDING for place in state.places) > 1:
        raise Broken(f"two are pending: {state}")
    is_quiet = all(step in {"done", "dead", "kept", "idle"} for step in state.steps)
    if is_quiet and not any(place in PENDING for place in state.places) and holder_state(state, rules) == "live":
        raise Broken(f"the key is taken for ever: {state}")


def holder_state(state: State, rules: Rules) -> str:
    """Whether the message that the key names has it: void, live or unsure."""
    holder = state.key
    if holder is None or not state.links[holder] or state.places[holder] in {FAIL, GONE}:
        return "void"
    if state.places[holder] == TMP:
        is_alive = state.steps[holder] != "dead"
        return "unsure" if is_alive and rules.waits_for_publishers else "void"
    return "live"


def publish(state: State, rules: Rules) -> Iterator[State]:
    """The next step of each publisher: it takes its id, and then the key."""
    for me in range(len(state.places)):
        step = state.steps[me]
        if step == "start" and state.lock is None:
            yield moved(state, me, "linked", links=put(state.links, me, True))
        elif step == "linked" and state.lock is None:
            yield moved(state, me, "locked", lock=me)
        elif step == "locked":
            found = holder_state(state, rules)
            if found == "unsure":
                yield moved(state, me, "linked", lock=None)
            elif found == "live":
                yield moved(state, me, "kept", lock=None, places=put(state.places, me, GONE))
            elif rules.keys_under_lock:
                yield moved(state, me, "keyed", key=me, lock=None)
            else:
                yield moved(state, me, "free", lock=None)
        elif step == "free":
            yield moved(state, me, "keyed", key=me)
        elif step == "keyed":
            yield moved(state, me, "done", places=put(state.places, me, QUEUE))


def requeue(state: State, rules: Rules) -> Iterator[State]:
    """The next step of the requeue, of any failed message."""
    me = len(state.places)
    step = state.steps[me]
    failed = [number for number, place in enumerate(state.places) if place == FAIL]
    if step == "idle" and (state.lock is None or not rules.requeues_under_lock):
        lock = me if rules.requeues_under_lock else state.lock
        for number in failed:
            if state.key == number or holder_state(state, rules) == "void":
                yield moved(state, me, f"{number}", lock=lock, key=number)
    elif step.isdigit():
        lock = None if state.lock == me else state.lock
        number = int(step)
        if state.places[number] == FAIL:
            yield moved(state, me, "idle", lock=lock, places=put(state.places, number, QUEUE))
        else:
            yield moved(state, me, "idle", lock=lock)


def work(state: State) -> Iterator[State]:
    """What workers and users do with a message."""
    for number, place in enumerate(state.places):
        if place == QUEUE:
            yield state._replace(places=put(state.places, number, LEASE))
        elif place == LEASE:
            for after in (QUEUE, FAIL):
                yield state._replace(places=put(state.places, number, after))
        if place in {QUEUE, LEASE, FAIL}:
            # Its link is removed later, or never.
            yield state._replace(places=put(state.places, number, GONE))
        if place == GONE and state.links[number]:
            yield state._replace(links=put(state.links, number, False))


def kill(state: State) -> Iterator[State]:
    """A process dies. The kernel frees its lock, and another one discards its file in tmp/."""
    for me, step in enumerate(state.steps):
        if step not in {"done", "dead", "kept", "idle"}:
            dead = "idle" if me == len(state.places) else "dead"
            yield moved(state, me, dead, lock=None if state.lock == me else state.lock)
    for number, place in enumerate(state.places):
        if place == TMP and state.steps[number] == "dead":
            yield state._replace(places=put(state.places, number, GONE))


def moved(state: State, me: int, step: str, **changes: Any) -> State:
    return state._replace(steps=put(state.steps, me, step), **changes)


def put(values: tuple[Any, ...], number: int, value: Any) -> tuple[Any, ...]:
    return (*values[:number], value, *values[number + 1 :])
