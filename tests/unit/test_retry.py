"""Retry policies are pure functions, and the most derived class of an error decides which one counts."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker import Backoff, Delays, NoRetry, RetryPolicy
from qworker.errors import UsageError
from qworker.failure_text import RemoteFailure
from qworker.retry import DEFAULT_BACKOFF, Retries, class_names


def test_the_ceiling_doubles_from_one_second_to_five_minutes():
    assert [DEFAULT_BACKOFF.max_delay(tries) for tries in (1, 2, 3, 9, 10, 10_000)] == [1, 2, 4, 256, 300, 300]


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    least, most = sorted((draw(st.floats(0, 1e6)), draw(st.floats(0, 1e6))))
    return Backoff(draw(st.floats(0, 1e6)), draw(st.floats(1, 1000)), most, least, draw(st.booleans()))


@given(backoffs(), st.integers(-1, 10**9), st.floats(0, 1, exclude_max=True))
def test_a_delay_lies_between_the_minimum_and_the_ceiling(backoff, tries, draw):
    delay, ceiling = backoff.delay(tries, draw), backoff.max_delay(tries)
    assert backoff.minimum <= delay <= ceiling <= backoff.maximum
    assert delay == (max(backoff.minimum, ceiling * draw) if backoff.jitter else ceiling)


@given(st.integers(1, 100))
def test_ceilings_never_fall(tries):
    assert DEFAULT_BACKOFF.max_delay(tries) <= DEFAULT_BACKOFF.max_delay(tries + 1)


def test_without_jitter_the_delays_are_exact():
    exact = Backoff(timedelta(seconds=2), maximum=timedelta(minutes=1), jitter=False)
    assert [exact.delay(tries, 0.3) for tries in (1, 2, 3, 6, 7)] == [2, 4, 8, 60, 60]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), st.integers(1, 20))
def test_given_delays_come_in_order_and_the_last_one_repeats(seconds, tries):
    assert Delays(*seconds).delay(tries, 0.5) == seconds[min(tries, len(seconds)) - 1]


def test_policies_are_shown_as_they_are_written():
    assert str(Retries.of(Delays(5, 10, 20))) == "Delays(5, 10, 20)"
    assert str(Retries.of({ValueError: NoRetry, OSError: 3}))[-36:] == "ValueError: NoRetry; OSError: Delays(3)"[-36:]
    assert str(Retries.of(9, (OSError,))) == "Delays(9) after OSError; others: NoRetry"


class Both(ConnectionError, ValueError):
    """An error with two bases."""


class Mine:
    """A policy of a user."""

    def delay(self, tries: int, draw: float) -> float:
        return tries + draw


OSERROR, CONNECTION, VALUE = Delays(1), Delays(2), Mine()
BY_CLASS = Retries.of({OSError: OSERROR, ConnectionError: CONNECTION, ValueError: VALUE, KeyError: NoRetry})


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("error", "policy"),
    [
        (OSError(), OSERROR),
        (ConnectionResetError(), CONNECTION),
        (TimeoutError(), OSERROR),
        (UnicodeError(), VALUE),
        (Both(), CONNECTION),
        (KeyError(), NoRetry),
        (LookupError(), DEFAULT_BACKOFF),
    ],
)
def test_the_policy_of_the_most_derived_class_counts_also_for_an_error_of_another_process(error, policy, elsewhere):
    if elsewhere:
        error = RemoteFailure("Any", "text", class_names(error))
    assert BY_CLASS.policy_for(error) is policy


def test_with_retry_on_all_others_fail_and_with_fail_on_all_others_are_retried():
    on = Retries.of(Delays(7), (OSError,))
    assert (on.policy_for(TimeoutError()), on.policy_for(ValueError())) == (Delays(7), NoRetry)
    off = Retries.of(timedelta(minutes=10), fail_on=ValueError)
    assert (off.policy_for(UnicodeError()), off.policy_for(OSError())) == (NoRetry, Delays(600))
    both = Retries.of(1, (OSError,), (TimeoutError,))
    assert (both.policy_for(ConnectionError()), both.policy_for(TimeoutError())) == (Delays(1), NoRetry)


def test_an_attribute_of_an_error_is_not_taken_for_the_names_of_its_classes():
    class Refused(ValueError):
        classes = ("economy", ["business"])

    retries = Retries.of({ValueError: 5, LookupError: NoRetry})
    assert retries.policy_for(Refused()).delay(1, 0.5) == 5


def test_a_policy_that_is_an_empty_collection_counts():
    class Mine(list):
        def delay(self, tries: int, draw: float) -> float:
            return 7.0

    assert Retries.of({ValueError: Mine()}).policy_for(ValueError()).delay(1, 0.5) == 7.0


def test_a_policy_is_any_object_with_the_method():
    policy: RetryPolicy = Mine()
    assert isinstance(policy, RetryPolicy)
    assert Retries.of(policy).usual is policy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((-1,), "retry delays must not be negative (got -1)"),
        ((True,), "retry must be a policy such as Backoff(initial=5), a number of seconds, or a mapping"),
        (("5m",), "retry must be a policy such as Backoff"),
        ((Backoff,), "retry must be a policy, not its class: write Backoff(...)"),
        ((float("nan"),), "retry delays must be a number of seconds (got nan)"),
        (({ValueError: "x"},), "retry must be a policy such as"),
        (({"ValueError": 5},), "retry must have exception classes (got 'ValueError')"),
        ((5, "OSError"), "retry_on must have exception classes (got 'OSError')"),
        ((5, (OSError, 7)), "retry_on must have exception classes (got 7)"),
        ((5, (), OSError()), "fail_on must have exception classes"),
        ((5, (OSError,), (OSError,)), "OSError is in retry_on and in fail_on: leave it out of one"),
        (({OSError: 5}, (), (ValueError,)), "retry= is a mapping: write ValueError: NoRetry into it"),
        (({OSError: 5}, (ValueError,)), "retry= is a mapping: write ValueError: a policy into it"),
    ],
)
def test_what_is_no_policy_is_refused_with_one_line(options, text):
    with pytest.raises(UsageError) as refused:
        Retries.of(*options)
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Delays, "Delays needs at least one delay, such as Delays(5, 10, 20)"),
        (lambda: Delays(5, timedelta(seconds=-1)), "retry delays must not be negative"),
        (lambda: Delays(1e12), "retry delays must be at most 315360000 seconds"),
        (lambda: Backoff(minimum=400), "Backoff: minimum must not exceed maximum (got 400 and 300)"),
        (lambda: Backoff(jitter=1), "Backoff: jitter must be True or False (got 1)"),
    ],
)
def test_a_policy_is_checked_when_it_is_made(make, text):
    with pytest.raises(UsageError) as refused:
        make()
    assert str(refused.value).startswith(text)
