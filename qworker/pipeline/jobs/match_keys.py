"""Match the rows of a table with messages for the same work.

`path=kwargs.path` means: the column `path` of the table is the argument `path` of the call. The left side is a column
or an SQL expression over the table. The right side is one of

    id, key, task      the id, the unique key or the task of the message
    args[0]            the first positional argument; args[0].name is a field of it
    kwargs.path        a named argument; kwargs.user.id is a field of it
    body, body.order   the body as text, or a field of a JSON body
    an SQL expression  over the columns that a message has in a DataFrame
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from qworker.errors import UsageError

__all__ = ["KeyMatch", "message_key", "parse_match", "source_key"]

_PLACE = re.compile(r"(args|kwargs|body)((?:\[\d+\]|\.[\w-]+)*)")
_STEP = re.compile(r"\[(\d+)\]|\.([\w-]+)")


class KeyMatch(NamedTuple):
    """One pair of expressions that must be equal as text."""

    source: str
    message: str


def parse_match(words: str) -> KeyMatch:
    """Read `SOURCE=MESSAGE`; `NAME` alone is `NAME=kwargs.NAME`.

    Raises:
        UsageError: A side is empty.
    """
    source, equals, message = (part.strip() for part in words.partition("="))
    if not equals and source:
        return KeyMatch(source, f"kwargs.{source}")
    if not source or not message:
        raise UsageError(f"{words!r}: write COLUMN=WHERE, such as path=kwargs.path, sku=args[0] or order_id=key")
    return KeyMatch(source, message)


def source_key(source: DataFrame, matches: Sequence[KeyMatch]) -> Column:
    """Return the key of each row of a table, as text; null if a part is null."""
    return _joined([F.col(f"`{m.source}`") if m.source in source.columns else F.expr(m.source) for m in matches])


def message_key(matches: Sequence[KeyMatch]) -> Column:
    """Return the key of each message, as text; null if a part is null."""
    return _joined([_of_message(m.message) for m in matches])


def _joined(parts: list[Column]) -> Column:
    texts = [part.cast("string") for part in parts]
    if len(texts) == 1:
        return texts[0]
    complete = F.lit(True)
    for one in texts:
        complete = complete & one.isNotNull()
    # The key is JSON, so that ("a,", "b") and ("a", ",b") are different keys.
    return F.when(complete, F.to_json(F.array(*texts)))


def _of_message(place: str) -> Column:
    if place in {"id", "key", "task"}:
        return F.col(place)
    found = _PLACE.fullmatch(place)
    if found is None or (found[1] != "body" and not found[2]):
        return F.expr(place)
    column = F.col(found[1]).cast("string")
    if not found[2]:
        return column
    steps = "".join(f"[{index}]" if index else f"['{name}']" for index, name in _STEP.findall(found[2]))
    return F.get_json_object(column, "$" + steps)
