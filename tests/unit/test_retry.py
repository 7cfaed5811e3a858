"""The backoff is a pure function."""

from hypothesis import given
from hypothesis import strategies as st

from qworker.retry import DEFAULT_BACKOFF, Backoff


def test_the_ceiling_doubles_from_one_second_to_five_minutes():
    assert [DEFAULT_BACKOFF.max_delay(tries) for tries in (1, 2, 3, 9, 10, 10_000)] == [1, 2, 4, 256, 300, 300]


@given(
    st.builds(Backoff, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1000)),
    st.integers(-1, 10**9),
    st.floats(0, 1, exclude_max=True),
)
def test_a_delay_lies_between_zero_and_the_limit(backoff, tries, draw):
    assert 0 <= backoff.delay(tries, draw) <= backoff.max_delay(tries) <= backoff.maximum


@given(st.integers(1, 100))
def test_ceilings_never_fall(tries):
    assert DEFAULT_BACKOFF.max_delay(tries) <= DEFAULT_BACKOFF.max_delay(tries + 1)
