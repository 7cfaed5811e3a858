"""Make drafts of the rows of a DataFrame: `task`, `args` and `kwargs`, or `body`; `due_at`, `priority` and `key`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pyarrow as pa

from qworker.definition.task_options import YEAR_10000
from qworker.errors import InvalidArguments, MessageTooLarge, UsageError
from qworker.kit.max_body import check_bodies
from qworker.message import Draft
from qworker.pipeline.source.call_encoder import CALL, CallMaker
from qworker.pipeline.spark.schema import column_names

__all__ = ["COLUMNS", "SOURCE", "RowReader", "check_columns"]

# The columns that a DataFrame can have, with the Spark types that each of them can have.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "task": ("string",),
    "args": ("string",),
    "kwargs": ("string",),
    "body": ("binary",),
    "due_at": ("timestamp", "timestamp_ntz", "double", "float", "bigint", "int"),
    "priority": ("tinyint", "smallint", "int", "bigint"),
    "key": ("string",),
}
# The columns of a table of Spark SQL that no INSERT can write.
READ_ONLY = frozenset(column_names("messages")) - COLUMNS.keys()
# The struct column with the original row, for the table of rejected rows.
SOURCE = "_source"

_json = msgspec.json.Encoder().encode
_check_args = msgspec.json.Decoder(list[msgspec.Raw]).decode
_check_kwargs = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_columns(types: Mapping[str, str], *, is_table: bool = False) -> None:
    """Check that a DataFrame can be enqueued, before anything runs.

    Args:
        types: The Spark types of the columns, by name.
        is_table: Whether they are those of a table, whose other columns must be null.

    Raises:
        UsageError: A column is missing, unknown or of the wrong type.
    """
    for name, found in types.items():
        if name == SOURCE or (is_table and name in READ_ONLY):
            continue
        wanted = COLUMNS.get(name)
        if wanted is None:
            raise UsageError(f"the column {name!r} is not one of {', '.join(COLUMNS)}: select those, or use load")
        if found not in wanted and found != "void":
            raise UsageError(
                f"the column {name!r} must be {' or '.join(wanted[:2])} (got {found}): "
                f"select CAST({name} AS {wanted[0]}) AS {name}"
            )
    if "body" not in types and "task" not in types:
        raise UsageError("the rows do not name a task: add a column `task`, or a binary `body`")


class RowReader:
    """A reader of record batches.

    Args:
        names: The columns.
        maker: Makes calls of the rows. None: the rows are calls.
        max_body: The largest body that the store takes, in bytes. A row with a larger one is rejected. None: any size.
        is_table: Whether the columns are those of a table. A row with a value in another column is rejected.
    """

    def __init__(
        self,
        names: Sequence[str],
        maker: CallMaker | None = None,
        *,
        max_body: int | None = None,
        is_table: bool = False,
    ) -> None:
        self._max_body = max_body
        self._read_only = READ_ONLY.intersection(names) if is_table else frozenset[str]()
        self._names = frozenset(names) - {SOURCE, CALL} - self._read_only
        self._maker = maker
        self._heads: dict[str, bytes] = {}
        # Whether the due times of the batch are timestamps, and not numbers.
        self._has_timestamps = False

    def read(self, batch: pa.RecordBatch) -> tuple[list[Draft], list[tuple[int, str]]]:
        """Return the drafts of a batch, and the numbers of its rejected rows with the reasons."""
        self._has_timestamps = "due_at" in self._names and pa.types.is_timestamp(
            cast("Any", batch.column("due_at")).type
        )
        columns: dict[str, list[Any]] = {name: self._values(batch, name) for name in self._names}
        bad = self._with_read_only(batch)
        task: str | None = None
        if self._maker is not None:
            task = self._maker.task
            bodies, bad = self._maker.make(batch)
            columns.update(body=bodies)
        if columns.keys() == {"body"} and not bad and self._fits(columns["body"]):
            return [Draft(body=body, task=task) for body in columns["body"]], []
        drafts: list[Draft] = []
        refused = {number for number, _ in bad}
        for number in range(batch.num_rows):
            if number in refused:
                continue
            try:
                drafts.append(self._draft({name: values[number] for name, values in columns.items()}, task))
            except (InvalidArguments, MessageTooLarge) as error:
                bad.append((number, str(error)))
        return drafts, bad

    def _with_read_only(self, batch: pa.RecordBatch) -> list[tuple[int, str]]:
        """Return the numbers of the rows with a value in a column that cannot be written, with the reasons."""
        bad: dict[int, str] = {}
        for name in sorted(self._read_only):
            column = cast("Any", batch.column(name))
            if column.null_count < batch.num_rows:
                for number, value in enumerate(cast("list[Any]", column.to_pylist())):
                    if value is not None:
                        bad.setdefault(number, f"the column {name!r} cannot be written: leave it out of the INSERT")
        return list(bad.items())

    @staticmethod
    def _values(batch: pa.RecordBatch, name: str) -> list[Any]:
        column = cast("Any", batch.column(name))
        if name == "due_at" and pa.types.is_timestamp(column.type):
            micro = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64()).to_pylist()
            return [None if value is None else value / 1e6 for value in micro]
        return cast("list[Any]", column.to_pylist())

    def _draft(self, row: Mapping[str, Any], task: str | None) -> Draft:
        body, task = row.get("body"), task or row.get("task")
        if body is None:
            if not task:
                other = " if `body` is null" if "body" in row else ""
                raise InvalidArguments(f"the column 'task' must not be null or empty{other}")
            body = self._envelope(task, row.get("args"), row.get("kwargs"))
        due_at = row.get("due_at")
        priority = row.get("priority") or 0
        if not 0 <= priority <= 9:
            raise InvalidArguments(f"the column 'priority' must be from 0 to 9 (got {priority})")
        key = row.get("key")
        if key is not None and not 0 < (size := len(key.encode())) <= 255:
            raise InvalidArguments(f"the column 'key' must have 1 to 255 bytes (got {size})")
        draft = Draft(
            body=body,
            task=task or None,
            due_at=None if due_at is None else self._time(due_at),
            priority=priority,
            unique_key=key,
        )
        check_bodies([draft], self._max_body)
        return draft

    def _time(self, value: float) -> float:
        # A timestamp before 1970 is a time too, and a negative number is not.
        if not (value >= 0 or self._has_timestamps) or not value < YEAR_10000:
            raise InvalidArguments(
                f"the column 'due_at' must be a time in Unix seconds, before the year 10000 (got {value:.15g})"
            )
        return float(value)

    def _fits(self, bodies: Sequence[bytes | None]) -> bool:
        """Return whether each row has a body, and none is too large."""
        return None not in bodies and (
            self._max_body is None or all(len(body) <= self._max_body for body in bodies if body is not None)
        )

    def _envelope(self, task: str, args: str | None, kwargs: str | None) -> bytes:
        head = self._heads.get(task)
        if head is None:
            if len(self._heads) > 1000:
                self._heads.clear()
            head = self._heads[task] = b'{"task":' + _json(task) + b',"args":'
        body = head + (b"[]" if args is None else _checked(args, "args", _check_args, "an array"))
        if kwargs is not None:
            body += b',"kwargs":' + _checked(kwargs, "kwargs", _check_kwargs, "an object")
        return body + b"}"


def _checked(text: str, name: str, check: Any, what: str) -> bytes:
    raw = text.encode()
    try:
        check(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArguments(f"the column {name!r} must be {what} in JSON ({error})") from error
    return raw
