"""A worker leases as many messages as it can start at once, and no more."""

import pytest

from qworker.message import Lease, Message
from qworker.worker.delivery import Delivery
from tests.support.worker_state import make_state


def delivery():
    return Delivery(Lease(message=Message(id="a", queue="q", body=b""), token=1, expires_at=0.0), 0.0, 30.0)


@pytest.fixture
def state():
    state = make_state(None, concurrency=10)
    state.held.update(delivery() for _ in range(4))
    return state


def test_a_lease_takes_a_consumer_until_its_settlement_is_on_its_way(state):
    assert state.capacity() == 6
    state.settling = 3
    assert state.capacity() == 9


def test_a_store_that_takes_no_settlements_is_not_leased_empty(state):
    state.held.update(delivery() for _ in range(6))
    state.settling = 30
    assert state.capacity() == 10
    state.held.update(delivery() for _ in range(10))
    assert state.capacity() == 0


def test_a_thread_that_outlives_its_message_takes_a_consumer(state):
    state.leftover_threads = 2
    assert state.capacity() == 4


def test_a_suspect_takes_no_consumer_and_a_worker_holds_no_more_suspects_than_it_has_consumers(state):
    state.suspects.update(list(state.held)[:2])
    assert state.capacity() == 8
    suspects = [delivery() for _ in range(12)]
    state.held.update(suspects)
    state.suspects.update(suspects)
    assert state.capacity() == 4


def test_nothing_is_leased_by_a_quiet_worker(state):
    state.quiet = True
    assert state.capacity() == 0


def test_released_messages_do_not_count_as_begun():
    state = make_state(None, max_messages=5)
    state.counts.leased, state.counts.released = 4, 1
    assert (state.begun, state.capacity()) == (3, 2)
