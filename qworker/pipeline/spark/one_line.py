"""Errors of qworker in a Spark program: one line, without the frames of Spark's Python worker."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from qworker.errors import QworkerError

__all__ = ["one_line_errors"]

C = TypeVar("C", bound=type)

# The variable with which Spark asks its Python workers to send an error without its frames.
_HIDE = "SPARK_HIDE_TRACEBACK"
# Spark sets one of them for each Python worker.
_IN_WORKER = ("PYTHON_WORKER_FACTORY_PORT", "PYTHON_WORKER_FACTORY_SOCK_PATH", "PYTHON_WORKER_FACTORY_SECRET")


def one_line_errors(cls: C) -> C:
    """Let Spark show an error of qworker that a method of this class raises as one line.

    An error that is not qworker's keeps its frames.
    """
    for name, method in vars(cls).copy().items():
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _wrapped(method))
    return cls


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(method):

        @wraps(method)
        def iterated(*args: Any, **kwargs: Any) -> Generator[Any]:
            with _hidden_frames():
                yield from method(*args, **kwargs)

        return iterated

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _hidden_frames():
            return method(*args, **kwargs)

    return called


@contextmanager
def _hidden_frames() -> Generator[None]:
    try:
        yield
    except QworkerError:
        # The worker sends this error and ends, so no other error is shown without its frames.
        if any(name in os.environ for name in _IN_WORKER):
            os.environ[_HIDE] = "1"
        raise
