"""The value of a handler: encoded where the handler runs, and only if it is wanted."""

import asyncio
import dataclasses
import importlib.util
import os
import sys

import pytest

from qworker.envelope import EncodedResult, encode_result
from qworker.worker import Worker, WorkerOptions

CHILD = """
import dataclasses
from qworker import Fail

@dataclasses.dataclass
class Size:
    width: int
    height: int

class Odd:
    pass

def size() -> Size: return Size(3, 4)
def nothing() -> None: pass
def odd() -> Odd: return Odd()
def fail() -> int: raise Fail("no")
def big() -> str: return "x" * 3_000_000
"""

EXPECTED = {
    "size": EncodedResult(b'{"width":3,"height":4}'),
    "nothing": EncodedResult(b"null"),
    "odd": EncodedResult(problem="TypeError: a value of the type Odd has no place in JSON"),
    "fail": None,
    "big": EncodedResult(b'"' + b"x" * 3_000_000 + b'"'),
}


class Wanting:
    """An observer that wants every value, and keeps it."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.found = {}

    def handler_started(self, delivery):
        delivery.keep_result = self.wanted

    def message_settled(self, delivery, outcome, error, duration):
        self.found[delivery.task] = delivery.result


@pytest.fixture
def functions(tmp_path, monkeypatch):
    name = f"values_{os.getpid()}_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def _as_kind(function, kind):
    if kind != "async":
        return function

    async def handler():
        return function()

    handler.__name__ = function.__name__
    return handler


async def _burst(app, observer):
    worker = Worker(app, WorkerOptions(burst=True, concurrency=2))
    worker.observers.append(observer)
    async with asyncio.timeout(40):
        assert await worker.run()
    return worker


@pytest.mark.parametrize("kind", ["async", "thread", "process"])
async def test_a_wanted_value_comes_back_from_every_kind_of_handler(app, functions, kind):
    for name in EXPECTED:
        await app.task(max_tries=1, process=kind == "process")(_as_kind(getattr(functions, name), kind)).enqueue()
    wanting = Wanting()
    worker = await _burst(app, wanting)
    assert wanting.found == EXPECTED
    # A value that cannot be encoded is no failed attempt: the work is done.
    assert (worker.counts.acked, worker.counts.failed) == (4, 1)


@pytest.mark.parametrize("kind", ["async", "thread", "process"])
async def test_a_value_that_nobody_wants_is_neither_encoded_nor_sent(app, functions, kind):
    for name in EXPECTED:
        await app.task(max_tries=1, process=kind == "process")(_as_kind(getattr(functions, name), kind)).enqueue()
    wanting = Wanting(wanted=False)
    await _burst(app, wanting)
    assert wanting.found == dict.fromkeys(EXPECTED)


def test_a_value_is_encoded_as_arguments_are():
    @dataclasses.dataclass
    class Point:
        x: float

    class Broken(dict):
        def items(self):
            raise RuntimeError("no items")

    assert encode_result(Point(1.5)) == EncodedResult(b'{"x":1.5}')
    assert encode_result([None, 2**80]) == EncodedResult(b"[null,1208925819614629174706176]")
    problem = "JSON cannot contain nan: use None or text instead"
    assert encode_result(Point(float("nan"))) == EncodedResult(problem=problem)
    assert encode_result({"a": [float("nan")]}) == EncodedResult(problem=problem)
    nested = []
    nested.append(nested)
    assert encode_result(nested).problem.startswith("RecursionError")
