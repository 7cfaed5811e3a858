"""Every type of a value arrives as it was sent, as an argument and as a result, in each kind of handler."""

import enum
import importlib.util
import subprocess
import sys
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker import Context, State, Tasks
from qworker.context import Context as Injected
from qworker.errors import InvalidArguments, UsageError
from qworker.signature import Signature
from qworker.values import decode_json, encode


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float = 0.5


@attrs.define
class Size:
    width: int
    unit: str = "px"


class Struct(msgspec.Struct):
    id: uuid.UUID
    path: Path


class Inner(pydantic.BaseModel):
    when: datetime
    amount: Decimal = Decimal("1.10")


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    name: str = pydantic.Field(alias="Name")
    inner: Inner
    tags: set[str] = set()

    @pydantic.computed_field
    @property
    def upper(self) -> str:
        return self.name.upper()


ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
INNER = Inner(when=datetime(2026, 11, 24, 8, tzinfo=UTC))
VALUES: list[tuple[Any, Any]] = [
    (Path, Path("/tmp/a b")),
    (PurePosixPath, PurePosixPath("x/y")),
    (uuid.UUID, ID),
    (Decimal, Decimal("1.000000000000000000001")),
    (Color, Color.BLUE),
    (bytes, b"\x00\xff"),
    (Point, Point(3)),
    (Size, Size(4)),
    (Struct, Struct(ID, Path("p"))),
    (Inner, INNER),
    (Model, Model(Name="n", inner=INNER, tags={"a"})),
    (datetime, datetime(2026, 11, 24, 8, tzinfo=UTC)),
    (date, date(2026, 11, 24)),
    (list[Model], [Model(Name="n", inner=INNER)]),
    (dict[str, Path], {"a": Path("b")}),
    (dict[int, Point], {1: Point(2)}),
    (tuple[Color, ...], (Color.RED, Color.BLUE)),
    (set[Decimal], {Decimal("0.1")}),
    (Inner | None, INNER),
    (list[tuple[Size, bytes]], [(Size(1), b"x")]),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
@pytest.mark.parametrize("where", ["async", "thread"])
async def test_a_value_arrives_and_comes_back_as_it_was_sent(app, kind, value, where):
    got = []

    async def on_the_loop(a: Any, *, b: Any) -> Any:
        got.append((a, b))
        return a

    def in_a_thread(a: Any, *, b: Any) -> Any:
        got.append((a, b))
        return a

    function = on_the_loop if where == "async" else in_a_thread
    function.__annotations__ = dict.fromkeys(("a", "b", "return"), kind)
    task = app.task(result=60)(function)
    job = await task.enqueue(value, b=value)
    await app.burst()
    assert got == [(value, value)]
    assert await job.result(timeout=5) == value


APP = """
from pathlib import Path
from decimal import Decimal
from tests.unit.test_values import Model, Point, Struct

def work(model: Model, points: list[Point], struct: Struct) -> dict[str, Model]:
    assert type(struct.path) is type(Path())
    return {points[0].__class__.__name__: model}
"""


async def test_values_go_to_a_process_and_back(app, tmp_path, monkeypatch):
    name = f"values_app_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, name, module)
    task = app.task(process=True, result=60)(module.work)
    model = module.Model(Name="n", inner={"when": INNER.when})
    job = await task.enqueue(model, [module.Point(1)], module.Struct(ID, Path("p")))
    await app.burst()
    assert await job.result(timeout=5) == {"Point": model}


LEAVES = (
    st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary()
    | st.uuids()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.sampled_from(Color)
    | st.builds(PurePosixPath, st.text("ab/", min_size=1))
    | st.builds(Point, st.integers(0, 9), st.floats(0, 1))
    | st.builds(Inner, when=st.datetimes(timezones=st.just(UTC)))
)


def with_types(values):
    """A value and its exact type."""
    return values.map(lambda value: (PurePosixPath if isinstance(value, PurePosixPath) else type(value), value))


NESTED = st.recursive(
    with_types(LEAVES),
    lambda inner: (
        inner.map(lambda one: (list[one[0]], [one[1], one[1]]))
        | inner.map(lambda one: (dict[str, one[0]], {"k": one[1]}))
        | st.tuples(inner, inner).map(lambda two: (tuple[two[0][0], two[1][0]], (two[0][1], two[1][1])))
    ),
    max_leaves=5,
)


@given(NESTED)
def test_nested_values_survive_and_are_accepted_when_they_are_enqueued(pair):
    kind, value = pair

    def work(a: Any) -> None: ...

    work.__annotations__["a"] = kind
    signature = Signature(work, Injected)
    signature.check_json()
    signature.check_values((value,), {})
    assert decode_json(encode(value), kind) == value
    (again,), _ = signature.convert(msgspec.json.decode(encode((value,))), {})
    assert again == value


@pytest.fixture
def tasks(request):
    return Tasks(f"memory://{request.node.name}")


REFUSED = [
    (int, True, "expected int, got bool"),
    (int, "1", "expected int, got str"),
    (int, 1.5, "expected int, got float"),
    (str, 5, "expected str, got int"),
    (list[int], [1, "a"], "expected int, got str - at $[1]"),
    (Point, Point("x"), "expected int, got str - at $.x"),
    (Path, 7, "expected PurePath, got int"),
    (Color, "green", "invalid enum value 'green'"),
    (Inner, {"amount": "1"}, "when: Field required"),
]


@pytest.mark.parametrize(("kind", "value", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_a_value_that_does_not_fit_is_refused_when_it_is_enqueued(tasks, kind, value, text):
    def work(ctx: Context, x: Any) -> None: ...

    work.__annotations__["x"] = kind
    task = tasks.task(work)
    for call in (lambda: task.call(value), lambda: task.enqueue_sync(value)):
        with pytest.raises(InvalidArguments) as refused:
            call()
        first, second = str(refused.value).split(": ", 1)
        assert first == "task 'work', argument 1 (x)"
        if kind is not Path:
            assert second.startswith(text)
    with pytest.raises(InvalidArguments, match=r"argument x: "):
        task.call(x=value)


def test_nan_and_infinity_are_refused_wherever_they_are(tasks):
    @tasks.task
    async def work(a: list[float], b: Any = None, c: float = 0.0) -> None: ...

    for args in (
        ([1.0, float("nan")],),
        ([], {"k": [float("inf")]}),
        ([], None, float("nan")),
        ([], Point(1, float("inf"))),
    ):
        for task in (work, work.using(validate=False)):
            with pytest.raises(InvalidArguments, match=r"JSON cannot contain (nan|inf)"):
                task.call(*args)


async def test_without_the_check_the_worker_refuses_the_value(app):
    @app.task
    async def work(x: int) -> None: ...

    await work.using(validate=False).enqueue("one")
    app.validate = False
    await work.enqueue("two")
    await app.burst()
    assert [one.error for one in await app.found(State.FAILED)] == [
        "code: arguments\ntask 'work', argument 1 (x): expected int, got str"
    ] * 2
    assert Tasks("memory://x", validate=False).validate is False
    with pytest.raises(UsageError, match="validate must be True or False"):
        Tasks("memory://x", validate=0)


class Socket:
    """A class that no message can carry."""


@pytest.mark.parametrize("kind", [Socket, list[Socket], dict[str, tuple[Socket, ...]], Socket | None])
def test_an_annotation_that_cannot_be_encoded_is_refused_at_registration(tasks, kind):
    def work(x: Any) -> None: ...

    def result() -> Any: ...

    work.__annotations__["x"] = kind
    result.__annotations__["return"] = kind
    with pytest.raises(UsageError, match=r"no JSON value can become .*Socket"):
        tasks.task(work)
    with pytest.raises(UsageError, match=r"no JSON value can become .*Socket"):
        tasks.task(result=60)(result)


def test_pydantic_is_not_imported_for_an_app_that_does_not_use_it():
    code = "import qworker, sys, qworker.values as v; v.encode({'a': 1}); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
