"""Two backends driven side by side: the memory backend is the model, and the other one must do as it does.

`check_lifecycle(make)` runs it; `make` gives a harness on a store, where each example has a queue of its own. A store with a clock of its own needs a harness whose
`advance` moves that clock (see tests/contract/conftest.py), for steps here are minutes long.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

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
from qworker.message import Draft, Lease, Query, Selection, SettleAction, Settlement, State
from qworker.names import new_ids
from qworker.testing.clock import FakeClock
from qworker.testing.harness import Harness
from tests.support.depth import DEPTH

T = TypeVar("T")
# No sum of steps is a visibility or a delay, so that nothing depends on what happens at the very moment of an expiry.
VISIBILITY = 60.0
STEPS = (7.0, 50.0, 130.0)
DELAYS = (0.0, 0.0, 33.0, 95.0)
# What is called how often.
CALLS = (
    *["publish"] * 4,
    *["lease"] * 5,
    *["settle"] * 6,
    *["advance"] * 4,
    *["extend"] * 2,
    *["publish_keyed"] * 2,
    *["crash", "publish_again", "remove", "requeue", "purge", "pause"],
)
LIVE = (State.READY, State.LEASED, State.DELAYED, State.FAILED)


_ASKED = os.environ.get("QWORKER_TEST_EXAMPLES")

SETTINGS = settings(
    max_examples=int(_ASKED or 60 * DEPTH),
    stateful_step_count=40,
    deadline=None,
    # The same examples in every run, unless somebody asks for more of them: CI is no place for luck, nor for the minutes in
    # which Hypothesis would look for the shortest failure.
    derandomize=_ASKED is None,
    phases=tuple(Phase) if _ASKED else (Phase.generate,),
    database=None,
    suppress_health_check=list(HealthCheck),
)


def check_lifecycle(make: Callable[[], Harness], how: settings = SETTINGS) -> None:
    """Compare a backend with the model; raises what Hypothesis finds."""
    run_state_machine_as_test(lambda: Lifecycle(make), settings=how)  # type: ignore[no-untyped-call]


class Held(NamedTuple):
    """One lease, in both stores, and the worker that has it in the real one."""

    worker: int
    model: Lease
    real: Lease


class Lifecycle(RuleBasedStateMachine):
    """Everything that can happen to messages, in any order, in two stores at once."""

    def __init__(self, make: Callable[[], Harness]) -> None:
        super().__init__()
        self.make = make

    @initialize()
    def open_both(self) -> None:
        self.runner = asyncio.Runner()
        self.queue = f"lifecycle-{secrets.token_hex(6)}"
        self.harness = self.make()
        self.clock = self.harness.clock or FakeClock()
        self.model = open_backend(f"memory://model-{secrets.token_hex(8)}", clock=self.clock)
        self.workers = [self.do(self.harness.open()) for _ in range(2)]
        self.do(self.model.create(self.queue))
        self.do(self.workers[0].create(self.queue))
        self.ids: list[str] = []
        # A publisher is one life of a worker: order is promised to each, not between them.
        self.publishers = [0, 1]
        # By publisher, never leased and never delayed: what first in, first out holds for.
        self.fresh: dict[int, list[str]] = defaultdict(list)
        self.held: list[Held] = []

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

    def publish(self, worker: int, number: int, delay: float) -> None:
        ids = new_ids(1 + number % 4)
        drafts = [Draft(body=name.encode(), id=name, delay=delay) for name in ids]
        assert (
            self.do(self.workers[worker].publish(self.queue, drafts))
            == self.do(self.model.publish(self.queue, drafts))
            == ids
        )
        self.ids.extend(ids)
        if not delay:
            self.fresh[self.publishers[worker]].extend(ids)

    def publish_keyed(self, worker: int, number: int, delay: float) -> None:
        if "unique_key" not in self.harness.deviations:
            drafts = [
                Draft(body=name.encode(), id=name, unique_key=f"key {number % 2}", delay=delay) for name in new_ids(1)
            ]
            ids = self.do(self.model.publish(self.queue, drafts))
            assert self.do(self.workers[worker].publish(self.queue, drafts)) == ids
            self.ids.extend(name for name in ids if name not in self.ids)

    def publish_again(self, worker: int, number: int, delay: float) -> None:
        # Of what is gone a store may know the id or not; of what is stored it must.
        for chosen in self.some_ids(number, 1):
            drafts = [Draft(body=b"again", id=chosen, delay=delay)]
            assert self.do(self.workers[worker].publish(self.queue, drafts)) == [chosen]
            assert self.do(self.model.publish(self.queue, drafts)) == [chosen]

    def some_ids(self, number: int, count: int) -> list[str]:
        """Some of the stored messages."""
        stored = [found.message.id for found in self.do(self.model.find(self.queue, self.ids))]
        start = number % len(stored) if stored else 0
        return stored[start : start + count]

    # -- consuming ---------------------------------------------------------------------------------------------------

    def lease(self, worker: int, number: int, delay: float) -> None:
        ready = {one.message.id: one for one in self.do(list_messages(self.model, self.queue, Query(State.READY)))}
        limit = 1 + number % 5
        wanted = 0 if self.do(self.model.stats(self.queue)).paused else min(limit, len(ready))
        leases = self.do(self.lease_all(self.workers[worker], limit, wanted))
        taken = [lease.message.id for lease in leases]
        assert len(set(taken)) == len(taken) == wanted
        assert set(taken) <= set(ready), "a message that is not ready was leased"
        for fresh in self.fresh.values():
            first = [message_id for message_id in taken if message_id in fresh]
            assert first == fresh[: len(first)], "messages were leased out of order"
            del fresh[: len(first)]
        for lease in leases:
            assert lease.message.body == lease.message.id.encode()
            assert lease.message.tries == ready[lease.message.id].message.tries
        claimed = self.do(self.lease_in_the_model(taken))
        self.held.extend(Held(worker, claimed[lease.message.id], lease) for lease in leases)

    async def lease_all(self, worker: Backend, limit: int, wanted: int) -> list[Lease]:
        """Lease until there is nothing more: a call may give fewer while others work on the queue."""
        leases: list[Lease] = []
        for _ in range(5):
            leases.extend(await worker.lease(self.queue, limit - len(leases), VISIBILITY))
            if len(leases) >= wanted:
                break
        return leases

    async def lease_in_the_model(self, ids: list[str]) -> dict[str, Lease]:
        """The model takes the same ones, where the order leaves a choice."""
        leases = (
            {lease.message.id: lease for lease in await self.model.lease(self.queue, 1000, VISIBILITY)} if ids else {}
        )
        others = [lease for message_id, lease in leases.items() if message_id not in ids]
        await self.model.settle([Settlement(lease=lease, action=SettleAction.RELEASE) for lease in others])
        return {message_id: leases[message_id] for message_id in ids}

    def extend(self, worker: int, number: int, delay: float) -> None:
        if self.held:
            held = self.held[number % len(self.held)]
            lost = self.workers[held.worker].extend([held.real], VISIBILITY)
            assert bool(lost) == bool(self.model.extend([held.model], VISIBILITY))

    def settle(self, worker: int, number: int, delay: float) -> None:
        if not self.held:
            return
        held = self.held.pop(number % len(self.held))
        options: dict[str, Any] = {"action": list(SettleAction)[number % 4], "delay": delay, "error": "because"}
        refused = self.do(self.workers[held.worker].settle([Settlement(lease=held.real, **options)]))
        expected = self.do(self.model.settle([Settlement(lease=held.model, **options)]))
        assert len(refused) == len(expected)

    def advance(self, worker: int, number: int, delay: float) -> None:
        """Time passes for workers that live: they reap about once a second."""
        seconds = STEPS[number % len(STEPS)]
        self.both("reap")
        self.do(self.harness.advance(seconds))
        if self.clock is not self.harness.clock:
            self.clock.advance(seconds)
        self.both("reap")

    def crash(self, worker: int, number: int, delay: float) -> None:
        """A worker is gone without a word, and another takes its place; what it held waits for its expiry."""
        self.workers[worker] = self.do(self.harness.open())
        self.publishers[worker] += 2
        self.held = [held for held in self.held if held.worker != worker]

    # -- administering -----------------------------------------------------------------------------------------------

    def remove(self, worker: int, number: int, delay: float) -> None:
        chosen = self.some_ids(number, 1 + number % 3)
        model, real = self.both("remove", Selection(ids=chosen))
        assert model == real == len(chosen)
        self.gone(set(chosen))

    def requeue(self, worker: int, number: int, delay: float) -> None:
        failed = [one.message.id for one in self.do(list_messages(self.model, self.queue, Query(State.FAILED)))]
        model, real = self.both("requeue", Selection(ids=failed[:1]) if number % 2 else Selection(state=State.FAILED))
        assert model == real

    def purge(self, worker: int, number: int, delay: float) -> None:
        for state in (LIVE, *[[one] for one in LIVE])[number % 5]:
            if state is not State.LEASED or number % 5:
                model, real = self.both("remove", Selection(state=state))
                assert model == real
        left = {one.message.id for one in self.do(list_messages(self.model, self.queue, Query(State.READY)))}
        self.gone(set(self.ids) - left)

    def gone(self, ids: set[str]) -> None:
        for fresh in self.fresh.values():
            fresh[:] = [name for name in fresh if name not in ids]

    def pause(self, worker: int, number: int, delay: float) -> None:
        self.both("resume" if self.do(self.model.stats(self.queue)).paused else "pause")

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def both_stores_hold_the_same(self) -> None:
        if not hasattr(self, "model"):
            return
        for state in LIVE:
            model, real = [
                self.do(list_messages(store, self.queue, Query(state))) for store in (self.model, self.workers[0])
            ]
            expected = {one.message.id: (one.message.tries, one.message.body) for one in model}
            found = {one.message.id: (one.message.tries, one.message.body) for one in real}
            assert found == expected, f"{state}: the store has {found}, the model {expected}"
            assert len(real) == len(found)
        model, real = self.both("stats")
        for name in ("ready", "leased", "delayed", "failed", "paused"):
            assert getattr(real, name) == getattr(model, name), f"{name}: {real} is not {model}"

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            with self.runner:
                self.do(self.workers[0].delete(self.queue))
                self.do(self.harness.aclose())
                self.do(self.model.aclose())
