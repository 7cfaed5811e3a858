"""The unique key of a call whose values make it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from qworker.errors import InvalidArguments, UsageError
from qworker.names import MOST_KEY
from qworker.unique import Unique

__all__ = ["check_by", "key_by", "without_function"]


def check_by(task: str, parameters: Sequence[str], unique: Unique | None) -> None:
    """Check that the parameters of a unique key exist.

    Raises:
        UsageError: One does not.
    """
    for name in () if unique is None else unique.by or ():
        if name not in parameters:
            takes = f"({', '.join(parameters)})"
            raise UsageError(f"task {task!r}: unique by {name!r} names no parameter: it takes {takes}")


def without_function(names: Sequence[str]) -> UsageError:
    """Return the refusal of a key by parameters of a task whose function this process does not have."""
    return UsageError(
        f"unique by {', '.join(map(repr, names))} needs the function of the task, which this process does not have:"
        " write key= instead"
    )


def key_by(task: str, names: Sequence[str], values: Sequence[Any]) -> str:
    """Return the key of a call, such as `reindex(user=7)`. A long one is a digest.

    Raises:
        InvalidArguments: A value cannot be encoded.
    """
    try:
        parts = [
            f"{name}={msgspec.json.encode(value, order='sorted').decode()}"
            for name, value in zip(names, values, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise InvalidArguments(f"task {task!r}: the values of the unique key cannot be encoded: {error}") from error
    key = f"{task}({','.join(parts)})"
    if len(key.encode()) <= MOST_KEY:
        return key
    return f"sha256-{hashlib.sha256(key.encode()).hexdigest()}"
