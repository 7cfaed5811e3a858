"""What is kept of an error, and what is read out of it again."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction

import pytest

from qworker import Fail, Retry
from qworker.decision import outcome_of
from qworker.errors import UsageError
from qworker.failure_text import failure_text, summary, summary_of
from qworker.retry import MOST_DELAY


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError

    def __float__(self) -> float:
        raise RuntimeError


def caught(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        _raise(error, cause)
    except BaseException as raised:  # noqa: BLE001 - whatever it is
        return raised
    raise AssertionError


def _raise(error: BaseException, cause: BaseException | None) -> None:
    if cause is not None:
        raise error from caught(cause)
    raise error


def python_text(error: BaseException) -> str:
    """As releases that knew no summaries have stored it."""
    return "".join(traceback.format_exception(error)).rstrip()


SEVERAL_LINES = (
    "1 validation error for Order\namount\n  Input should be a valid integer\n"
    "    For further information visit https://errors"
)
GROUP = ExceptionGroup("many", [ValueError("a\nb"), ExceptionGroup("some", [OSError("x")])])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (caught(ValueError("no luck")), "ValueError: no luck"),
        (caught(ValueError(SEVERAL_LINES)), "ValueError: 1 validation error for Order"),
        (caught(ValueError("\n\n  begins late\nand ends")), "ValueError: begins late"),
        (caught(ValueError()), "ValueError"),
        (caught(UsageError("of a module")), "UsageError: of a module"),
        (caught(Unsayable()), "Unsayable: <exception str() failed>"),
        (caught(GROUP), "ExceptionGroup: many (2 sub-exceptions)"),
        (caught(KeyError("a"), ValueError("b")), "KeyError: 'a'"),
        (caught(GROUP, ValueError("b")), "ExceptionGroup: many (2 sub-exceptions)"),
        (caught(KeyError("a"), GROUP), "KeyError: 'a'"),
        (caught(SyntaxError("bad", ("file", 1, 1, "x = = 1"))), "SyntaxError: bad"),
        (
            caught(ValueError("Traceback (most recent call last):\n  File\nKeyError: 'of a child'")),
            "ValueError: Traceback (most recent call last):",
        ),
    ],
    ids=range(12),
)
def test_what_went_wrong_is_the_type_and_the_first_line_in_stored_texts_too(error, expected):
    assert summary(failure_text(error)) == summary(python_text(error)) == summary_of(error) == expected


def test_notes_and_causes_that_were_never_raised_do_not_hide_it():
    error = ValueError("no luck")
    error.add_note("a note")
    error.__cause__ = KeyError("never raised")
    assert summary(python_text(caught(error))) == summary(python_text(error)) == "ValueError: no luck"


@pytest.mark.parametrize(
    "text", ["a.b: c", "first\nsecond", "\n first \n", "first\n\nTraceback (most recent call last):\n  x\nA: b"]
)
def test_of_a_text_that_is_not_a_traceback_the_first_line_is_shown(text):
    assert summary(text) == ("a.b: c" if "a.b" in text else "first")


def test_a_text_that_is_cut_keeps_what_went_wrong():
    text = failure_text(caught(ValueError("news\n" + "x" * 100_000)))
    assert len(text) < 10_000
    assert summary(text) == "ValueError: news"
    assert summary(f"{text[:400]}\n... 9000 characters left out ...\n{'x' * 30}") == "ValueError: news"


def test_no_error_is_too_broken_for_a_text():
    broken = SyntaxError("bad", ("file", 1, 1, 5))
    # Python 3.14 can print it, and others cannot.
    assert summary(failure_text(caught(broken))) in {"SyntaxError", "SyntaxError: bad"}
    assert "\udc80" not in failure_text(caught(ValueError("\udc80")))
    failure_text(caught(ValueError("\udc80"))).encode()


# -- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (timedelta(minutes=1), 60.0),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
        (-3, 0.0),
        (timedelta(seconds=-1), 0.0),
        (MOST_DELAY, MOST_DELAY),
    ],
)
def test_a_delay_is_seconds_or_a_timedelta(delay, seconds):
    retry = Retry("later", delay=delay)
    assert retry.delay == seconds
    assert type(retry.delay) is float


@pytest.mark.parametrize(
    "delay",
    [
        "30",
        b"30",
        True,
        math.nan,
        math.inf,
        -math.inf,
        1e300,
        10**400,
        Decimal("sNaN"),
        [],
        Unshowable(),
        timedelta.max,
    ],
)
def test_a_delay_that_cannot_be_kept_is_refused_in_one_line(delay):
    with pytest.raises(UsageError, match=r"^delay must be .*\(got .*\)"):
        Retry("later", delay=delay)


@pytest.mark.parametrize("kind", [Retry, Fail])
@pytest.mark.parametrize("reason", [404, b"bytes", {"a": "b"}, None, Unshowable()])
def test_a_reason_that_is_not_text_is_refused_in_one_line(kind, reason):
    with pytest.raises(UsageError, match=rf"^{kind.__name__}: the reason must be text or an exception \(got .*\)$"):
        kind(reason)


@pytest.mark.parametrize("kind", [Retry, Fail])
def test_an_exception_as_the_reason_is_its_first_line_and_keeps_its_traceback(kind):
    outcome = kind(caught(ValueError("no luck\nat all")))
    assert (outcome.reason, str(outcome)) == ("ValueError: no luck",) * 2
    reason = outcome_of(outcome).reason
    assert reason.startswith("ValueError: no luck\n\nTraceback (most recent call last):\n")
    assert reason.endswith("\nValueError: no luck\nat all")
    assert outcome_of(kind(ValueError("never raised")))[0] == "ValueError: never raised"
    assert kind(Unsayable()).reason == "Unsayable: <exception str() failed>"


def test_the_cause_of_an_outcome_keeps_its_traceback_behind_the_reason():
    cause = ValueError("no luck")
    for raised in (caught(Retry("later", delay=1), cause), caught(Fail("never"), cause)):
        reason = outcome_of(raised).reason
        assert summary(reason) == raised.reason
        assert "test_failure.py" in reason
        assert reason.endswith("ValueError: no luck")
    alone = Fail("never")
    alone.__context__, alone.__suppress_context__ = cause, True
    assert outcome_of(alone) == ("never", None, True)


@pytest.mark.parametrize("outcome", [Retry("later", delay=3), Retry(ValueError("x")), Fail("never"), Fail()])
def test_outcomes_can_be_copied_and_pickled(outcome):
    for copied in (copy.copy(outcome), pickle.loads(pickle.dumps(outcome))):
        assert (type(copied), copied.reason, copied.args) == (type(outcome), outcome.reason, outcome.args)
        assert getattr(copied, "delay", None) == getattr(outcome, "delay", None)


def test_a_subclass_need_not_call_the_constructor():
    class Limited(Retry):
        def __init__(self, seconds: float) -> None:
            self.delay = seconds

    assert outcome_of(Limited(5.0)) == ("the handler asked for a retry", 5.0, True)
