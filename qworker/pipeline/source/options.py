"""The options of a read: `spark.read.format("qworker").option(...)`."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from qworker.backend.registry import backend_class
from qworker.duration import parse_duration
from qworker.errors import NotSupported, UsageError
from qworker.message import STATE_WORDS, State
from qworker.names import check_existing_queue
from qworker.pipeline.spark.schema import TABLES, column_names, selected
from qworker.url import BackendURL

__all__ = ["ReadOptions", "check_path", "checked_url"]

_KNOWN = (
    "url",
    "queue",
    "state",
    "table",
    "columns",
    "partitions",
    "consume",
    "starting_position",
    "max_messages",
    "max_bytes",
    "visibility",
    "after",
    "failOnDataLoss",
)
# The names that Spark's own sources have for them.
_SPARKS = {"maxoffsetspertrigger": "max_messages", "startingoffsets": "starting_position"}
_STARTING = ("channel", "earliest", "latest")


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a batch read or of a stream.

    Attributes:
        url: The store.
        queues: The queues. Empty: every queue of the store.
        states: The states of the messages.
        table: `messages` or `events`.
        columns: The columns to return, in order. Empty: all.
        partitions: The approximate number of tasks that read a state of a queue.
        after: For events, by log of the history: the positions after which to continue.
        consume: For streams: lease messages instead of following a log.
        starting_position: For streams: where to begin (`channel`, `earliest` or `latest`).
        max_messages: For streams: the largest number of messages in one batch.
        max_bytes: For streams: the largest size of one batch in bytes.
        visibility: For streams: the length of a lease in seconds.
        fail_on_data_loss: For streams: whether the query fails if records of the log are gone that it has not read.
    """

    url: str
    queues: tuple[str, ...] = ()
    states: tuple[State, ...] = tuple(State)
    table: str = "messages"
    columns: tuple[str, ...] = ()
    partitions: int = 2
    after: dict[str, str] = {}
    consume: bool = False
    starting_position: str = "channel"
    max_messages: int = 10_000
    max_bytes: int = 32 << 20
    visibility: float = 60.0
    fail_on_data_loss: bool = True

    @property
    def schema(self) -> str:
        """The columns in Spark's notation."""
        return selected(self.table, self.columns)

    @classmethod
    def parse(cls, given: Mapping[str, object], parallelism: int) -> ReadOptions:
        """Read Spark's options.

        Args:
            given: The options, as texts by lower-case name.
            parallelism: The number of tasks that the session runs at the same time.

        Raises:
            UsageError: An option is unknown, missing or not valid.
        """
        texts = _our_names({name.lower(): str(value) for name, value in given.items()})
        check_path(texts, "load")
        known = {name.lower() for name in _KNOWN}
        for name in texts:
            if name not in known:
                raise UsageError(f"unknown option {name!r} of the format qworker. Options: {', '.join(_KNOWN)}")
        table = _choice(texts, "table", tuple(TABLES))
        names = texts.get("columns")
        return cls(
            url=checked_url(texts),
            queues=tuple(check_existing_queue(name) for name in _list(texts, "queue")),
            states=tuple(map(_state, _list(texts, "state"))) or tuple(State),
            table=table,
            columns=tuple(column_names(table)) if names is None else tuple(_list(texts, "columns")),
            partitions=_number(texts, "partitions", parallelism),
            after=_positions(texts.get("after", "{}")),
            consume=_choice(texts, "consume", ("false", "true")) == "true",
            starting_position=_choice(texts, "starting_position", _STARTING),
            max_messages=_number(texts, "max_messages", 10_000),
            max_bytes=_number(texts, "max_bytes", 32 << 20),
            visibility=_duration(texts, "visibility", 60.0),
            fail_on_data_loss=_choice(texts, "failondataloss", ("true", "false")) == "true",
        )

    @property
    def parsed(self) -> BackendURL:
        """The parsed URL of the store."""
        return BackendURL.parse(self.url)

    @property
    def scheme(self) -> str:
        """The scheme of the store's URL."""
        return self.parsed.scheme

    @property
    def queue(self) -> str:
        """The queue of a stream.

        Raises:
            UsageError: No queue or several queues are named.
        """
        if len(self.queues) != 1:
            raise UsageError('a stream must have exactly one queue: pass .option("queue", "NAME")')
        return self.queues[0]


def _our_names(texts: Mapping[str, str]) -> dict[str, str]:
    """Replace the names of Spark's own sources."""
    ours = {name: text for name, text in texts.items() if name not in _SPARKS}
    for name, text in texts.items():
        if name in _SPARKS and ours.setdefault(_SPARKS[name], text) != text:
            raise UsageError(f"{name} and {_SPARKS[name]} are the same option: pass one of them")
    return ours


def check_path(texts: Mapping[str, str], method: str) -> None:
    """Check that no path is given.

    Raises:
        UsageError: The caller gave one as the argument of `load`, `save` or `start`.
    """
    if "path" in texts:
        raise UsageError(
            f"the format qworker has no path (got {texts['path']!r}): "
            f'pass .option("url", "file:///var/spool/app") and call .{method}() without arguments'
        )


def checked_url(texts: Mapping[str, str]) -> str:
    """Return the store's URL if other processes can open it.

    Raises:
        UsageError: It is missing or not known, or the store exists in one process only.
    """
    url = texts.get("url")
    if url is None:
        raise UsageError(
            'the format qworker needs a URL: pass .option("url", "file:///var/spool/app"), '
            "or in SQL create the table without columns: CREATE TABLE t USING qworker OPTIONS (url '...', queue '...')"
        )
    parsed = BackendURL.parse(url)
    if not backend_class(parsed.scheme).shared:
        raise NotSupported(
            f"{parsed.scheme}: queues exist only in the process that created them, "
            "and Spark's workers are other processes: use file: or redis:"
        )
    return url


def _positions(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise UsageError(f"the option 'after' must be a JSON object of logs and positions: {error}") from error


def _list(texts: Mapping[str, str], name: str) -> list[str]:
    return [word.strip() for word in texts.get(name, "").split(",") if word.strip()]


def _choice(texts: Mapping[str, str], name: str, words: tuple[str, ...]) -> str:
    return _one_of(name, texts.get(name, words[0]).lower(), words)


def _state(word: str) -> State:
    # The stored word of the column is accepted too.
    if word == State.FAILED.value:
        return State.FAILED
    return State.of_word(_one_of("state", word, [*STATE_WORDS.values()]))


def _one_of(name: str, word: str, words: tuple[str, ...] | list[str]) -> str:
    if word not in words:
        raise UsageError(f"the option {name!r} must be one of {', '.join(words)} (got {word!r})")
    return word


def _duration(texts: Mapping[str, str], name: str, default: float) -> float:
    text = texts.get(name)
    if text is None:
        return default
    try:
        return parse_duration(text, least=1.0)
    except UsageError as error:
        raise UsageError(f"the option {name!r}: {error}") from None


def _number(texts: Mapping[str, str], name: str, default: int) -> int:
    text = texts.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"the option {name!r} must be a whole number of at least 1 (got {text!r})")
    return int(text)
