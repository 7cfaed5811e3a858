"""Make task calls of rows, on the executors. They are encoded and checked as the worker decodes and checks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa

from qworker.errors import InvalidArguments
from qworker.signature import Signature

__all__ = ["CALL", "CallMaker"]

# The struct column of a row's arguments.
CALL = "_call"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class CallMaker:
    """A maker of envelopes, which is pickled for the executors.

    Args:
        task: The name of the task.
        signature: The signature that the arguments must fit. None: any.
        names: The parameters that are given.
        text: Whether numbers and booleans can be texts, which are then parsed.
    """

    def __init__(self, task: str, signature: Signature | None, names: Sequence[str], *, text: bool = False) -> None:
        self.task = task
        self._text = text
        self._signature = signature
        self._names = tuple(names)
        self._head = b'{"task":' + _encode(task) + b',"args":[],"kwargs":'
        # If an argument cannot be null but has a default, a null is left out.
        self._optional = [] if signature is None else [name for name in names if signature.refuses_none(name)]

    def make(self, batch: pa.RecordBatch) -> tuple[list[bytes | None], list[tuple[int, str]]]:
        """Return the bodies of the rows, and the numbers of the rejected rows with the reasons."""
        bodies: list[bytes | None] = []
        bad: list[tuple[int, str]] = []
        for number, call in enumerate(self._calls(batch)):
            try:
                bodies.append(self._body(call))
            except InvalidArguments as error:
                bodies.append(None)
                bad.append((number, str(error)))
        return bodies, bad

    def _calls(self, batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        if not self._names:
            yield from ({} for _ in range(batch.num_rows))
            return
        calls = cast("Any", batch.column(CALL))
        columns = [_values(values) for values in calls.flatten()]
        for values in zip(*columns, strict=True):
            yield dict(zip(self._names, values, strict=True))

    def _body(self, call: dict[str, Any]) -> bytes:
        if self._optional:
            call = {name: value for name, value in call.items() if value is not None or name not in self._optional}
        try:
            kwargs = _encode(call)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidArguments(f"a column cannot be encoded as JSON: {error}") from error
        if self._signature is not None:
            _, read = self._signature.convert((), _decode(kwargs), strict=not self._text)
            if self._text:
                kwargs = _encode(read)
        return self._head + kwargs + b"}"


def _values(column: Any) -> list[Any]:
    values = cast("list[Any]", column.to_pylist())
    # Arrow returns pairs for a JSON object.
    return [None if value is None else dict(value) for value in values] if pa.types.is_map(column.type) else values
