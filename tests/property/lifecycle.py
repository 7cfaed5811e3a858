"""Two backends driven side by side: the memory backend is the model, and the other one must do as it does.

`check_lifecycle(make)` runs it; `make` gives a harness on a store, where each example has a queue of its own. A store
with a clock of its own needs a harness whose `advance` moves that clock (see tests/contract/conftest.py), for steps
here are minutes long. What the store declares as a deviation is not asked of it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from qworker.backend import Backend
from qworker.backend.listing import list_messages
from qworker.backend.registry import open_backend
from qworker.message import (
    Draft,
    FinishedMessage,
    Lease,
    Query,
    Selection,
    SettleAction,
    Settlement,
    State,
    StoredMessage,
)
from qworker.names import new_ids
from qworker.testing.clock import FakeClock
from qworker.testing.harness import Harness
from qworker.testing.wait_until import wait_until
from qworker_memory.backend import MemoryBackend
from tests.support.depth import DEPTH

T = TypeVar("T")
# No sum of steps is a visibility or a delay, so that nothing depends on what happens at the very moment of an expiry.
VISIBILITY = 60.0
FOREVER = 1e9
STEPS = (7.0, 50.0, 130.0)
DELAYS = (0.0, 0.0, 33.0, 95.0)
# Seconds that a lease may wait for a message: real ones, and too few to notice.
TIMEOUTS = (0.0, 0.0, 0.002)
# What is called how often.
CALLS = (
    *["publish"] * 4,
    *["lease"] * 5,
    *["settle"] * 6,
    *["advance"] * 4,
    *["extend"] * 2,
    *["publish_keyed"] * 2,
    *["browse"] * 2,
    *["requeue"] * 2,
    *["cancel"] * 2,
    *["crash", "die", "publish_again", "remember", "remove", "remove_state", "cancel_state", "pause"],
)
LIVE = (State.READY, State.LEASED, State.DELAYED, State.FAILED)


_ASKED = os.environ.get("QWORKER_TEST_EXAMPLES")

SETTINGS = settings(
    max_examples=int(_ASKED or 20 * DEPTH),
    stateful_step_count=40,
    deadline=None,
    # The same examples in every run, unless somebody asks for more of them: CI is no place for luck, nor for the
    # minutes in which Hypothesis would look for the shortest failure.
    derandomize=_ASKED is None,
    phases=tuple(Phase) if _ASKED else (Phase.generate,),
    database=None,
    suppress_health_check=list(HealthCheck),
)


def check_lifecycle(make: Callable[[], Harness], how: settings = SETTINGS, *, alone: bool = False) -> None:
    """Compare a backend with the model; raises what Hypothesis finds.

    Args:
        make: Makes the harness of an example.
        how: How many examples.
        alone: Whether only one process at a time leases from a queue.
    """
    run_state_machine_as_test(lambda: Lifecycle(make, alone), settings=how)  # type: ignore[no-untyped-call]


class Held(NamedTuple):
    """One lease, in both stores, and the worker that has it in the real one."""

    worker: int
    model: Lease
    real: Lease


class Remembered(NamedTuple):
    """A failed message as both stores showed it, and when."""

    id: str
    model: FinishedMessage
    real: FinishedMessage
    step: int


def finished(stored: StoredMessage) -> FinishedMessage:
    return FinishedMessage(
        id=stored.message.id, state=stored.state, finished_at=stored.finished_at, location=stored.location
    )


class Lifecycle(RuleBasedStateMachine):
    """Everything that can happen to messages, in any order, in two stores at once."""

    def __init__(self, make: Callable[[], Harness], alone: bool) -> None:
        super().__init__()
        self.make = make
        self.alone = alone

    @initialize()
    def open_both(self) -> None:
        self.runner = asyncio.Runner()
        self.queue = f"lifecycle-{secrets.token_hex(6)}"
        self.harness = self.make()
        self.clock = self.harness.clock or FakeClock()
        self.model = open_backend(f"memory://model-{secrets.token_hex(8)}", clock=self.clock)
        self.workers = [self.do(self.harness.open()) for _ in range(2)]
        self.deviations = self.harness.deviations
        self.expires = "expiry" not in self.deviations
        self.do(self.model.create(self.queue))
        self.do(self.workers[0].create(self.queue))
        self.ids: list[str] = []
        self.step = 0
        # A publisher is one life of a worker: order is promised to each, not between them.
        self.publishers = [0, 1]
        # By publisher, never leased and never delayed: what first in, first out holds for.
        self.fresh: dict[int, list[str]] = defaultdict(list)
        # The life of a worker that has leased last.
        self.last_leaser: int | None = None
        self.held: list[Held] = []
        self.remembered: list[Remembered] = []
        # The losses that workers were told: the worker, the id and the token.
        self.told: set[tuple[int, str, int]] = set()

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def both(self, name: str, *args: Any) -> tuple[Any, Any]:
        model = self.do(getattr(self.model, name)(self.queue, *args))
        return model, self.do(getattr(self.workers[0], name)(self.queue, *args))

    @rule(
        what=st.sampled_from(CALLS),
        worker=st.sampled_from([0, 1]),
        number=st.integers(0, 11),
        delay=st.sampled_from(DELAYS),
    )
    def call(self, what: str, worker: int, number: int, delay: float) -> None:
        """One rule for all calls: with a rule for each, Hypothesis would leave most of them out of most examples."""
        getattr(self, what)(worker=worker, number=number, delay=delay)

    # -- producing ---------------------------------------------------------------------------------------------------

    def store(self, worker: int, drafts: list[Draft]) -> list[str]:
        """Publish to both stores; where the real one gives the ids, the model takes them."""
        if "given_ids" in self.deviations:
            # Ids are made of the time, which two workers of one process and one clock would have in common.
            self.clock.advance(0.001)
            real = [msgspec.structs.replace(draft, id=None) for draft in drafts]
            ids = self.do(self.workers[worker].publish(self.queue, real))
            drafts = [msgspec.structs.replace(draft, id=name) for draft, name in zip(drafts, ids, strict=True)]
            assert self.do(self.model.publish(self.queue, drafts)) == ids
        else:
            ids = self.do(self.model.publish(self.queue, drafts))
            assert self.do(self.workers[worker].publish(self.queue, drafts)) == ids
        self.ids.extend(name for name in ids if name not in self.ids)
        return ids

    def publish(self, worker: int, number: int, delay: float) -> None:
        priority = 5 if number == 11 and "priority" not in self.deviations else 0
        names = new_ids(1 + number % 4)
        ids = self.store(worker, [Draft(body=name.encode(), id=name, delay=delay, priority=priority) for name in names])
        assert len(set(ids)) == len(names)
        if not delay and not priority:
            self.fresh[self.publishers[worker]].extend(ids)

    def publish_keyed(self, worker: int, number: int, delay: float) -> None:
        if "unique_key" not in self.deviations:
            (name,) = new_ids(1)
            self.store(worker, [Draft(body=name.encode(), id=name, unique_key=f"key {number % 2}", delay=delay)])

    def publish_again(self, worker: int, number: int, delay: float) -> None:
        # Of what is gone a store may know the id or not; of what is stored it must.
        if "given_ids" not in self.deviations:
            for chosen in self.some_ids(number, 1):
                assert self.store(worker, [Draft(body=b"again", id=chosen, delay=delay)]) == [chosen]

    def some_ids(self, number: int, count: int) -> list[str]:
        """Some of the stored messages."""
        stored = [found.message.id for found in self.do(self.model.find(self.queue, self.ids))]
        start = number % len(stored) if stored else 0
        return stored[start : start + count]

    # -- consuming ---------------------------------------------------------------------------------------------------

    def lease(self, worker: int, number: int, delay: float) -> None:
        worker = 0 if self.alone else worker
        ready = {one.message.id: one for one in self.do(list_messages(self.model, self.queue, Query(State.READY)))}
        limit = 1 + number % 5
        wanted = 0 if self.do(self.model.stats(self.queue)).paused else min(limit, len(ready))
        leases = self.do(self.lease_all(self.workers[worker], limit, wanted, TIMEOUTS[number % 3]))
        taken = [lease.message.id for lease in leases]
        assert len(set(taken)) == len(taken) == wanted
        assert set(taken) <= set(ready), "a message that is not ready was leased"
        self.check_the_order(taken, by=self.publishers[worker])
        for lease in leases:
            assert lease.message.body == ready[lease.message.id].message.body
            assert lease.message.tries == ready[lease.message.id].message.tries
        claimed = self.do(self.lease_in_the_model(taken))
        self.held.extend(Held(worker, claimed[lease.message.id], lease) for lease in leases)

    def check_the_order(self, taken: list[str], by: int) -> None:
        if self.last_leaser not in {None, by}:
            # Who finds that another has taken what comes first leaves the next ones to it.
            self.fresh.clear()
        for fresh in self.fresh.values():
            first = [message_id for message_id in taken if message_id in fresh]
            assert first == fresh[: len(first)], "messages were leased out of order"
            del fresh[: len(first)]
        if taken:
            self.last_leaser = by

    async def lease_all(self, worker: Backend, limit: int, wanted: int, timeout: float) -> list[Lease]:
        """Lease until there is nothing more: a call may give fewer while others work on the queue."""
        leases: list[Lease] = []
        for _ in range(5):
            leases.extend(await worker.lease(self.queue, limit - len(leases), VISIBILITY, timeout))
            if len(leases) >= wanted:
                break
        return leases

    async def lease_in_the_model(self, ids: list[str]) -> dict[str, Lease]:
        """The model takes the same ones, where the order leaves a choice."""
        visibility = VISIBILITY if self.expires else FOREVER
        leases = (
            {lease.message.id: lease for lease in await self.model.lease(self.queue, 1000, visibility)} if ids else {}
        )
        others = [lease for message_id, lease in leases.items() if message_id not in ids]
        await self.model.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in others])
        return {message_id: leases[message_id] for message_id in ids}

    def extend(self, worker: int, number: int, delay: float) -> None:
        if self.held and "extend" not in self.deviations:
            held = self.held[number % len(self.held)]
            lost = self.workers[held.worker].extend([held.real], VISIBILITY)
            assert bool(lost) == bool(self.model.extend([held.model], VISIBILITY if self.expires else FOREVER))

    def settle(self, worker: int, number: int, delay: float) -> None:
        """Settle up to three leases of one worker in one call, each in its own way."""
        some = [held for held in self.held if held.worker == worker][: 1 + number % 3]
        ways = [
            {"action": list(SettleAction)[(number + place) % 4], "delay": delay, "error": f"because of {number}"}
            for place in range(len(some))
        ]
        real = [Settlement(lease=held.real, **way) for held, way in zip(some, ways, strict=True)]
        model = [Settlement(lease=held.model, **way) for held, way in zip(some, ways, strict=True)]
        refused = [real.index(one) for one in self.do(self.workers[worker].settle(real))]
        assert sorted(refused) == sorted(model.index(one) for one in self.do(self.model.settle(model)))
        self.held = [held for held in self.held if held not in some]
        failed = {
            held.real.message.id for held, one in zip(some, real, strict=True) if one.action is SettleAction.FAIL_PERM
        }
        # What failed twice at one time is unchanged to the microsecond.
        self.remembered = [one for one in self.remembered if one.id not in failed or one.step != self.step]

    def advance(self, worker: int, number: int, delay: float) -> None:
        """Time passes for workers that live: they reap about once a second."""
        seconds = STEPS[number % len(STEPS)]
        self.reap()
        self.do(self.harness.advance(seconds))
        if self.clock is not self.harness.clock:
            self.clock.advance(seconds)
        self.reap()
        self.check_the_losses()
        self.step += 1

    def reap(self) -> None:
        self.do(self.model.reap(self.queue))
        self.reap_by(0)

    def reap_by(self, worker: int) -> None:
        for lost in self.do(self.workers[worker].reap(self.queue)).lost:
            told = (worker, lost.id, lost.token)
            assert told not in self.told, "a loss was told twice"
            self.told.add(told)

    def check_the_losses(self) -> None:
        """Each worker is told the losses of its own leases, and no others."""
        if not self.alone:
            self.reap_by(1)
        for held in self.held:
            told = (held.worker, held.real.message.id, held.real.token) in self.told
            assert isinstance(self.model, MemoryBackend)
            is_lost = self.model._store.get_leased(held.model) is None
            assert told == (is_lost and "lost_leases" not in self.deviations)

    def crash(self, worker: int, number: int, delay: float) -> None:
        """A worker is gone without a word, and another takes its place; what it held waits for its expiry."""
        if self.expires and not self.alone:
            self.replace(worker)
            self.held = [held for held in self.held if held.worker != worker]

    def die(self, worker: int, number: int, delay: float) -> None:
        """End a worker's process: its messages wait for their expiry, or are ready if the store notices the end."""
        if self.alone and self.do(self.model.stats(self.queue)).paused:
            return
        self.do(self.workers[worker].aclose())
        self.replace(worker)
        self.reap_by(0)
        if self.alone:
            # What the process held is ready when another takes its place, which it does when it leases.
            taken = self.do(self.workers[0].lease(self.queue, 1, VISIBILITY))
            back = [Settlement(lease=lease, action=SettleAction.RELEASE) for lease in taken]
            assert self.do(self.workers[0].settle(back)) == []
        lost = [held for held in self.held if held.worker == worker]
        self.held = [held for held in self.held if held.worker != worker]
        found = self.do(self.workers[0].find(self.queue, [held.real.message.id for held in lost]))
        ready = {one.message.id: one.message.tries for one in found if one.state is State.READY}
        for held in lost:
            if held.real.message.id in ready:
                # A lock that the kernel frees is no try.
                same = not self.expires and ready[held.real.message.id] == held.real.message.tries
                action = SettleAction.RELEASE if same else SettleAction.FAIL_TMP
                self.do(self.model.settle([Settlement(lease=held.model, action=action)]))

    def replace(self, worker: int) -> None:
        self.workers[worker] = self.do(self.harness.open())
        self.publishers[worker] += 2

    # -- administering -----------------------------------------------------------------------------------------------

    def remember(self, worker: int, number: int, delay: float) -> None:
        """Look at what has failed, to select it later if it is unchanged."""
        model, real = [
            {one.message.id: finished(one) for one in self.do(list_messages(store, self.queue, Query(State.FAILED)))}
            for store in (self.model, self.workers[worker])
        ]
        assert set(model) == set(real)
        self.remembered += [Remembered(name, model[name], real[name], self.step) for name in model]

    def selections(self, number: int) -> tuple[Selection, Selection]:
        """Return a selection of failed messages for the model and for the store: by ids, by state, or unchanged."""
        if number % 3 == 0 or ("remove_by_state" in self.deviations and number % 3 == 1):
            chosen = Selection(ids=[*self.some_ids(number, 1 + number % 4), "unknown"])
            return chosen, chosen
        if number % 3 == 1:
            return Selection(state=State.FAILED), Selection(state=State.FAILED)
        some = {one.id: one for one in self.remembered[-1 - number :]}.values()
        return Selection(unchanged=[one.model for one in some]), Selection(unchanged=[one.real for one in some])

    def requeue(self, worker: int, number: int, delay: float) -> None:
        if "requeue" not in self.deviations:
            model, real = self.selections(number)
            expected = self.do(self.model.requeue(self.queue, model))
            assert self.do(self.workers[worker].requeue(self.queue, real)) == expected

    def remove(self, worker: int, number: int, delay: float) -> None:
        model, real = self.selections(number)
        expected = self.do(self.model.remove(self.queue, model))
        assert self.do(self.workers[worker].remove(self.queue, real)) == expected
        self.forget_the_gone()

    def remove_state(self, worker: int, number: int, delay: float) -> None:
        if "remove_by_state" not in self.deviations:
            model, real = self.both("remove", Selection(state=LIVE[number % 4]))
            assert model == real
            self.forget_the_gone()

    def cancel(self, worker: int, number: int, delay: float) -> None:
        if "cancel" not in self.deviations:
            self.cancel_both(worker, Selection(ids=[*self.some_ids(number, 1 + number % 4), "unknown"]))

    def cancel_state(self, worker: int, number: int, delay: float) -> None:
        if "cancel" not in self.deviations:
            self.cancel_both(worker, Selection(state=LIVE[number % 3]))

    def cancel_both(self, worker: int, selection: Selection) -> None:
        model, real = [
            {one.id: (one.state, one.already) for one in self.do(store.cancel(self.queue, selection, "somebody"))}
            for store in (self.model, self.workers[worker])
        ]
        assert model == real
        # What failed twice at one time is unchanged to the microsecond.
        self.remembered = [one for one in self.remembered if one.id not in model or one.step != self.step]
        self.forget_the_gone()

    def forget_the_gone(self) -> None:
        left = {one.message.id for one in self.do(self.model.find(self.queue, self.ids)) if one.state is State.READY}
        for fresh in self.fresh.values():
            fresh[:] = [name for name in fresh if name in left]

    def pause(self, worker: int, number: int, delay: float) -> None:
        if "pause" not in self.deviations:
            self.both("resume" if self.do(self.model.stats(self.queue)).paused else "pause")

    def browse(self, worker: int, number: int, delay: float) -> None:
        """A state in whole, page after page by positions, in both directions, and in parts."""
        state = LIVE[number % 4]
        store = self.workers[worker]
        expected = sorted(one.message.id for one in self.do(list_messages(self.model, self.queue, Query(state))))
        whole = [one.message.id for one in self.do(list_messages(store, self.queue, Query(state)))]
        assert sorted(whole) == expected, f"{state}: the store has {whole}, the model {expected}"
        newest = number % 2 == 1
        paged = [one.message.id for one in self.do(self.pages(store, state, 1 + number % 3, newest=newest))]
        assert paged == (whole[::-1] if newest else whole)
        parts = self.do(store.parts(self.queue, state, 1 + number % 4))
        queries = [Query(state, part=part) for part in parts]
        divided = [one.message.id for query in queries for one in self.do(list_messages(store, self.queue, query))]
        assert sorted(divided) == expected

    async def pages(self, store: Backend, state: State, limit: int, *, newest: bool) -> list[StoredMessage]:
        """All messages of a state, a few at a time."""
        found: list[StoredMessage] = []
        while True:
            after = found[-1].position if found else None
            page = await list_messages(store, self.queue, Query(state, after=after, limit=limit, newest=newest))
            assert len(page) <= limit
            if not page:
                return found
            found += page

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def both_stores_hold_the_same(self) -> None:
        if not hasattr(self, "model"):
            return
        self.do(self.compare())
        model, real = self.both("stats")
        for name in ("ready", "leased", "delayed", "failed", "paused"):
            assert getattr(real, name) == getattr(model, name), f"{name}: {real} is not {model}"

    async def compare(self) -> None:
        expected = await self.everything(self.model)
        found: dict[str, tuple[Any, ...]] = {}

        async def are_equal() -> bool:
            nonlocal found
            found = await self.everything(self.workers[0])
            return found == expected

        # Where a lock is the lease, the kernel frees it a moment after the end.
        equal = await are_equal() or (not self.expires and await wait_until(are_equal, timeout=5.0))
        assert equal, f"the store has {found}, the model {expected}"

    async def everything(self, store: Backend) -> dict[str, tuple[Any, ...]]:
        """Every message that was ever published and is not done, by its id."""
        return {
            one.message.id: (
                one.state,
                one.message.tries,
                one.message.body,
                one.error if one.state is State.FAILED and "errors_kept" not in self.deviations else None,
            )
            for one in await store.find(self.queue, self.ids)
            if one.state is not State.DONE
        }

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            with self.runner:
                self.do(self.workers[0].delete(self.queue))
                self.do(self.harness.aclose())
                self.do(self.model.aclose())
