"""One pass over names gives the counts of a queue, however the names are divided into slices."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from qworker.kit.directory.tally import Tally
from qworker.message import State

_ITEMS = st.lists(st.text("_@#!x019", min_size=1, max_size=6), max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(State), _ITEMS), max_size=8))
def test_a_tally_of_slices_is_that_of_all_names(slices: list[tuple[State, list[str]]]) -> None:
    tally = Tally()
    for state, items in slices:
        tally.add(state, items)
    counts = Counter(state for state, items in slices for _ in items)
    assert tally.counts == {state: counts[state] for state in State}
    ready = [item for state, items in slices if state is State.READY for item in items]
    smallest = {item[0]: item for item in sorted(ready, reverse=True)}
    assert sorted(tally.first_items) == sorted(smallest.values())
