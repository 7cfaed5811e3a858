"""Arguments: checked when a call is made, converted when it runs."""

import datetime
import enum
import inspect
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.context import Context
from qworker.errors import InvalidArguments, UsageError
from qworker.signature import Signature


class Colour(enum.Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: int
    y: int = 0


@dataclass
class Box:
    name: str


def made(function, *args, **kwargs):
    return Signature(function, Context).convert(args, kwargs)


def test_arguments_become_what_the_annotations_say():
    def work(when: datetime.datetime, colour: Colour, point: Point, *, box: Box, tags: frozenset[str]) -> None: ...

    args, kwargs = made(work, "2026-01-02T03:04:05Z", "red", {"x": 1}, box={"name": "b"}, tags=["a", "a"])
    assert args == [datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), Colour.RED, Point(1)]
    assert kwargs == {"box": Box("b"), "tags": frozenset({"a"})}


def test_star_arguments_are_converted_too():
    def work(first: str, /, *rest: Point, **more: Colour) -> None: ...

    args, kwargs = made(work, "a", {"x": 1}, {"x": 2}, first="red")
    assert args == ["a", Point(1), Point(2)]
    assert kwargs == {"first": Colour.RED}


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing"),
        ((1, 2, 3), {}, "too many"),
        ((1,), {"c": 1}, "'c'"),
        ((1,), {"a": 1}, "multiple values"),
        (("one",), {}, "argument 1"),
        ((1,), {"b": []}, "argument b"),
    ],
)
def test_what_does_not_fit_is_named(args, kwargs, problem):
    def work(a: int, b: str = "") -> None: ...

    with pytest.raises(InvalidArguments, match=problem) as raised:
        made(work, *args, **kwargs)
    assert "work" in str(raised.value)


def test_a_required_keyword_is_required():
    def work(*, a: int) -> None: ...

    with pytest.raises(InvalidArguments, match="'a'"):
        made(work)


def plain(a, b): ...


def mixed(a, /, b, c=1, *, d=2): ...


def named_only(*, a, b=1): ...


def surplus(a, *b, c=1, **d): ...


def shadowing(a, /, b=1, **c): ...


@pytest.mark.parametrize("work", [plain, mixed, named_only, surplus, shadowing])
@given(args=st.lists(st.integers(), max_size=5), kwargs=st.dictionaries(st.sampled_from("abcd"), st.integers()))
def test_check_agrees_with_python(work, args, kwargs):
    try:
        work(*args, **kwargs)
    except TypeError:
        if _bound_nevertheless(work, args, kwargs):
            assert Signature(work, Context).check(args, kwargs) is None
            return
        with pytest.raises(InvalidArguments):
            Signature(work, Context).check(args, kwargs)
    else:
        assert Signature(work, Context).check(args, kwargs) is None


def _bound_nevertheless(work, args, kwargs):
    """Only Python 3.13.0 binds a positional-only argument by its name. `check` accepts what `inspect` accepts there."""
    try:
        inspect.signature(work).bind(*args, **kwargs)
    except TypeError:
        return False
    assert sys.version_info[:3] == (3, 13, 0)
    return True


def test_a_context_comes_first_and_is_not_an_argument():
    def work(ctx: Context, a: int) -> None: ...

    signature = Signature(work, Context)
    assert signature.takes_injected
    assert signature.convert([1], {}) == ([1], {})

    def wrong(a: int, ctx: Context) -> None: ...

    with pytest.raises(UsageError, match="first parameter"):
        Signature(wrong, Context)


def test_an_annotation_that_no_json_can_become_is_refused_when_the_task_is_registered():
    def work(a: object, b: Any, c: int | None = None) -> None: ...

    Signature(work, Context)

    def wrong(a: dict[Point, int] | list[int] | set[int]) -> None: ...

    with pytest.raises(UsageError, match="'wrong'"):
        Signature(wrong, Context)

    def unknown(a: "Nowhere") -> None: ...  # noqa: F821

    with pytest.raises(UsageError, match="import what it names"):
        Signature(unknown, Context)


@pytest.mark.parametrize(
    ("wanted", "given", "made"),
    [
        (int, True, 1),
        (float, True, 1.0),
        (list[int], [2, True, False], [2, 1, 0]),
        (dict[str, float | None], {"a": True, "b": None}, {"a": 1.0, "b": None}),
        (int | str, False, 0),
        (bool, True, True),
        (Any, True, True),
        (int | bool, True, True),
    ],
)
def test_a_truth_value_is_a_number_as_for_python_and_type_checkers(wanted, given, made):
    def work(x) -> None: ...

    work.__annotations__ = {"x": wanted}
    (value,), _ = Signature(work, Context).convert([given], {})
    assert value == made
    assert repr(value) == repr(made)


@pytest.mark.parametrize(("wanted", "given"), [(str, True), (list[str], [True]), (Point, True), (int, "1"), (int, [1])])
def test_what_is_no_number_does_not_become_one(wanted, given):
    def work(x) -> None: ...

    work.__annotations__ = {"x": wanted}
    with pytest.raises(InvalidArguments, match=r"argument 1 \(\w+\): expected"):
        Signature(work, Context).convert([given], {})


def test_a_context_of_a_state_is_a_context():
    def work(ctx: Context[Box], a: int) -> None: ...

    assert Signature(work, Context).takes_injected


def resize(path: str, *sizes: int, width: int = 0, **options: float) -> None: ...


def test_a_signature_checks_the_same_in_another_process():
    sent = pickle.loads(pickle.dumps(Signature(resize, Context)))
    sent.check_values(("a.png", 1), {"width": 2, "quality": 0.5})
    for args, kwargs in (
        ((1,), {}),
        (("a.png", "b"), {}),
        (("a.png",), {"width": "c"}),
        (("a.png",), {"quality": "d"}),
    ):
        with pytest.raises(InvalidArguments):
            sent.check_values(args, kwargs)
