"""The names of files, which are the complete state of a message. No code here uses a disk.

    item     _<timestamp>_<entropy>_<pid>_<host>_<tries>[_<argument>]...      in queue/, done/ and fail/: an fsq item
    fail     <item>_~cancelled                                                in fail/: a cancelled item
    lease    <item>.<expiry, ms>.<holder>                                     in lease/
    delay    <due, ms>.<item>                                                 in delay/

The first character of an item is its delimiter, which is also its priority: `_` is 0, `@ = ; ) ( & $ # !` are 1 to 9.
So names sort in the order in which messages are leased. The first four fields are the message's id. An id of another
form, chosen by its publisher, is in the host field after a `~`. Marks follow it, each after a comma: `h<end, ms>` is
the end of its hold, and `k<digest>` stands for its unique key. Letters follow that digest: `a` if the key counts in all
queues; if it is free from the first lease on, `s` before that lease, `x` from then on. `r<time, ms>` is when the last
call with the key took the place of the message; such an item has a tenth digit in its entropy, by which no release
takes its name for that of one file only. Zeros in front of the tries count the deaths: `_003` are 3
tries with 2 deaths. Every program that reads the tries as a number skips them.
"""

from __future__ import annotations

import base64
import calendar
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from qworker.names import check_id

__all__ = [
    "DELIMITERS",
    "LAST_DUE_MS",
    "MAX_HOLDER",
    "MAX_OWN",
    "Item",
    "alias_target",
    "byte_length",
    "cancelled_name",
    "count_labels",
    "delay_name",
    "first_moment",
    "given_id",
    "has_key",
    "hold_end_ms",
    "hold_name",
    "index_name",
    "is_app_mark",
    "is_cancelled_name",
    "is_delay_name",
    "is_due_time",
    "is_generated_id",
    "is_started_mark",
    "item_name",
    "key_letters",
    "key_link_name",
    "key_mark",
    "key_record_name",
    "lease_name",
    "make_alias",
    "mark_in",
    "may_lack_link",
    "next_name",
    "parse_delay",
    "parse_id",
    "parse_item",
    "parse_lease",
    "place_name",
    "plain_item",
    "ready_names",
    "reason_name",
    "replacing_stem",
    "restarted_item",
    "started_item",
    "stem_for",
    "swap_name",
    "with_tries",
    "without_letters",
]

# Bytes. The names that qworker gives leave room below 255 for the suffixes of a lease.
MAX_OWN = 195
MAX_HOLDER = 40

# The delimiters of the priorities 0 to 9. A higher one sorts before a lower one. No host and no id has one of them.
DELIMITERS = "_@=;)(&$#!"
_ESCAPES = {delimiter: f"%{ord(delimiter):02x}" for delimiter in DELIMITERS}
_PRIORITIES = {delimiter: priority for priority, delimiter in enumerate(DELIMITERS)}

_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,119}")
# A name that qworker and fsq write on ordinary hosts, up to its arguments.
_USUAL = re.compile(r"_([0-9]{14})_([0-9]{1,20})_([0-9]{1,20})_([A-Za-z0-9.:-]+)_([0-9]{1,9})(?:_|\Z)")
# The ids of messages that have no link in names/: those of qworker and fsq, of bulk writes, and digests of other names.
_UNLINKED = re.compile(r"[^_]+_[0-9]+_[0-9]+_.+|.+:[0-9]+:[0-9]+:[0-9]+|x-[0-9a-f]{40}")
_ESCAPE = re.compile(rb"%([0-9a-fA-F]{2})?")
# The digits of the tries, with the zeros of the deaths. Other programs read no more.
_TRIES_DIGITS = 9
_MOST_DEATHS = 5
_GIVEN = "~"
# The last due time that 13 digits can show, in the year 2286. Later ones are due then.
LAST_DUE_MS = 9_999_999_999_999
_ALIAS = "~"
# The last argument of a cancelled item in fail/. So the rename decides that it is cancelled, and the reason has
# another name than that of a holder that fails the message at the same moment.
_CANCELLED = "~cancelled"
# Marks follow a given id in the host field, each after a comma, which no id has. Unknown marks are kept as they are.
_MARK = ","
_HOLD = "h"
_KEY = "k"
_REPLACED = "r"
# Characters of the digest of a unique key, after which its letters follow.
_KEY_DIGEST = 20
_FREE_WHEN_STARTED, _STARTED = "s", "x"
_IN_ALL_QUEUES = "a"
# What each name with such a mark has somewhere.
_KEY_MARK, _HOLD_MARK = _MARK + _KEY, _MARK + _HOLD


class Item(msgspec.Struct, frozen=True, gc=False):
    """The fields of an item's name."""

    id: str
    tries: int
    arguments: tuple[str, ...]
    # Unix seconds; None if the timestamp has another format than qworker's.
    enqueued_at: float | None
    # Only qworker makes names like this: such a file is complete as soon as it is visible.
    is_own: bool = False
    deaths: int = 0
    priority: int = 0


# -- items -----------------------------------------------------------------------------------------------------------


def item_name(stem: str, tries: int, arguments: Iterable[str] = (), priority: int = 0) -> str:
    """Return the name of an item: its first four fields, its tries, its arguments, and its priority from 0 to 9."""
    if not priority:
        return f"_{stem}_{tries}" + "".join([f"_{_encode(argument, '_')}" for argument in arguments])
    delimiter = DELIMITERS[priority]
    fields = [*stem.split("_"), str(tries), *[_encode(argument, delimiter) for argument in arguments]]
    return delimiter + delimiter.join(fields)


def parse_item(name: str, *, local: bool = False) -> Item | None:
    """Read the name of an item, whichever program gave it, or return None if it is not one.

    Args:
        name: The file's name.
        local: Whether timestamps are in this host's local time.
    """
    usual = _USUAL.match(name)
    if usual is not None and (rest := name[usual.end() :]).find("%") < 0 and usual.end(4) <= 121:
        stamp, entropy, _, host, tries = usual.groups()
        words = tuple(rest.split("_")) if usual.end() < len(name) or name[-1] == "_" else ()
        own = len(entropy) == 9 and host[-9:-8] == "-"
        return Item(name[1 : usual.end(4)], int(tries), words, _moment(stamp, entropy, local), own, _deaths(tries))
    return _parse_unusual(name, local)


def _parse_unusual(name: str, local: bool) -> Item | None:
    if len(name) < 10 or name[0] in ".%/":
        return None
    delimiter = name[0]
    fields = name[1:].split(delimiter)
    if len(fields) < 5:
        return None
    stamp, entropy, pid, host, tries = fields[:5]
    if not (stamp and host and _number(entropy) and _number(pid) and _number(tries) and len(tries) <= 9):
        return None
    arguments: list[str] = []
    for field in fields[5:]:
        argument = _decode(field)
        if argument is None:
            return None
        arguments.append(argument)
    if _decode(host) is None:
        return None
    priority = _PRIORITIES.get(delimiter)
    is_given = pid == "0" and host.startswith(_GIVEN)
    replaced_ms = _replaced_ms(host) if is_given else None
    own = priority is not None and len(entropy) == 9 and (is_given or host[-9:-8] == "-")
    return Item(
        id=_id(stamp, entropy, pid, host),
        tries=int(tries),
        arguments=tuple(arguments),
        enqueued_at=_moment(stamp, entropy, local) if replaced_ms is None else replaced_ms / 1000,
        is_own=own,
        deaths=_deaths(tries),
        priority=priority or 0,
    )


def count_labels(items: Sequence[str]) -> Counter[str]:
    """Return the number of items with each task label. "" is for items without one, and of other programs.

    The items of one publisher and task differ in their first 25 characters only, so few of them are parsed.
    """
    usual = [item[25:] for item in items if item[25:26] == item[0] == item[15:16]]
    labels: Counter[str] = Counter()
    for end, count in Counter(usual).items():
        labels[_label(f"{end[0]}20000101000000{end[0]}000000000{end}")] += count
    if len(usual) < len(items):
        labels.update(_label(item) for item in items if not item[25:26] == item[0] == item[15:16])
    return labels


def _label(item: str) -> str:
    parsed = parse_item(item)
    if parsed is None or not parsed.is_own or len(parsed.arguments) != 1 or alias_target(parsed.arguments) is not None:
        return ""
    # Other programs can give a file a name that is not valid text.
    return os.fsencode(parsed.arguments[0]).decode(errors="replace")


def parse_id(name: str) -> str | None:
    """Return the message id in an item's name, or None if it cannot be an item. Cheaper than `parse_item`."""
    usual = _USUAL.match(name)
    if usual is not None and usual.end(4) <= 121:
        return name[1 : usual.end(4)]
    if not name or name[0] in ".%/":
        return None
    fields = name[1:].split(name[0], 5)
    return _id(*fields[:4]) if len(fields) >= 5 else None


def with_tries(name: str, tries: int, deaths: int = 0) -> str:
    """Return the name of the same item with other numbers of failed attempts and deaths."""
    delimiter = name[0]
    fields = name[1:].split(delimiter, 5)
    # More tries than these leave no room for the deaths that end a message which kills its workers.
    digits = str(min(tries, 10 ** (_TRIES_DIGITS - min(deaths, _MOST_DEATHS)) - 1))
    fields[4] = digits.zfill(min(len(digits) + deaths, _TRIES_DIGITS))
    return delimiter + delimiter.join(fields)


def _deaths(tries: str) -> int:
    """Return the deaths in the tries of a name. Each death is a try too, so zeros of other programs count no more."""
    return 0 if tries == "0" or tries[0] != "0" else min(len(tries) - len(tries.lstrip("0")), int(tries))


def stem_for(message_id: str, fresh: str, hold_end_ms: int | None = None, key_mark: str = "") -> str:
    """Return the first four fields for an id that its publisher chose.

    An id of the form of qworker's own ids is treated as any other: its time is not that of this publish, and would
    break the order.

    Args:
        message_id: The id. It is checked here once more, because it becomes part of a path.
        fresh: A new stem, whose time the message gets.
        hold_end_ms: The end of its hold, in Unix milliseconds; None without one.
        key_mark: The mark of its unique key; empty without one.
    """
    check_id(message_id)
    stamp, entropy, _ = fresh.split("_", 2)
    # Ids have no plus sign, and fields no underscore.
    marks = "" if hold_end_ms is None else f"{_MARK}{_HOLD}{hold_end_ms}"
    if key_mark:
        marks += _MARK + key_mark
    return f"{stamp}_{entropy}_0_{_GIVEN}{message_id.replace('_', '+')}{marks}"


def _id(stamp: str, entropy: str, pid: str, host: str) -> str:
    if host.startswith(_GIVEN) and pid == "0":
        given = host[1:].partition(_MARK)[0].replace("+", "_")
        if _PLAIN_ID.fullmatch(given):
            return given
    plain = f"{stamp}_{entropy}_{pid}_{host}"
    if _PLAIN_ID.fullmatch(plain):
        return plain
    # This is a host name that no id can have: the message still needs one name that is the same in all its states.
    return "x-" + hashlib.sha256(os.fsencode(plain)).hexdigest()[:40]


def _number(field: str) -> bool:
    return field.isascii() and field.isdigit()


def _moment(stamp: str, entropy: str, local: bool) -> float | None:
    second = _second(stamp, local)
    if second is None or len(entropy) != 9:
        return second
    return second + int(entropy) / 1e9


@lru_cache(maxsize=256)
def _second(stamp: str, local: bool) -> float | None:
    if len(stamp) != 14 or not _number(stamp):
        return None
    try:
        parsed = time.strptime(stamp, "%Y%m%d%H%M%S")
        return time.mktime(parsed) if local else float(calendar.timegm(parsed))
    except (ValueError, OverflowError):
        return None


def _encode(argument: str, delimiter: str) -> str:
    escaped = argument.replace("%", "%25").replace("/", "%2f").replace("\0", "%00")
    return escaped.replace(delimiter, _ESCAPES[delimiter])


def _decode(field: str) -> str | None:
    """Decode a field, or return None if an escape is truncated or not hexadecimal."""
    if "%" not in field:
        return field
    raw = os.fsencode(field)
    if any(match[1] is None for match in _ESCAPE.finditer(raw)):
        return None
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), raw))


# -- states ----------------------------------------------------------------------------------------------------------


def lease_name(item: str, expiry_ms: int, holder: str) -> str:
    """Return the name of a leased item. The whole name is the key of a compare-and-swap."""
    return f"{item}.{expiry_ms}.{holder}"


def parse_lease(name: str) -> tuple[str, int, str] | None:
    """Return item, expiry in milliseconds and holder, or None for a file that is not a lease."""
    parts = name.rsplit(".", 2)
    if len(parts) != 3 or not _number(parts[1]) or not parts[0] or not parts[2]:
        return None
    return parts[0], int(parts[1]), parts[2]


def delay_name(item: str, due_ms: int) -> str:
    """Return the name of an item that waits until it is due. Names sort by the due time, which has 13 digits."""
    return f"{min(max(due_ms, 0), LAST_DUE_MS):013d}.{item}"


def is_delay_name(name: str) -> bool:
    """Return whether a name has its place in the order of due times."""
    return name[13:14] == "." and len(name) > 14 and _number(name[:13])


def is_due_time(due_ms: int) -> bool:
    """Return whether a number can be a time in milliseconds: before the year 10000."""
    return due_ms < 253_402_300_800_000


def parse_delay(name: str) -> tuple[int, str] | None:
    """Return due time in milliseconds and item, or None for a file without a due time."""
    due, dot, item = name.partition(".")
    if not dot or not item or not _number(due):
        return None
    return int(due), item


def cancelled_name(item: str) -> str:
    """Return the name in fail/ of an item that is cancelled."""
    return f"{item}{item[0]}{_CANCELLED}"


def is_cancelled_name(name: str) -> bool:
    """Return whether a name in fail/ is that of a cancelled item."""
    return name.endswith(_CANCELLED) and name[-len(_CANCELLED) - 1 : -len(_CANCELLED)] == name[:1]


def plain_item(name: str) -> str:
    """Return the item in a name of fail/, whether it was cancelled or not."""
    return name[: -len(_CANCELLED) - 1] if is_cancelled_name(name) else name


def ready_names(message_id: str, task: str) -> tuple[str, ...]:
    """Return the names in queue/ that a message of a task can have whose id qworker created: two for each priority.

    A message with tries waits in delay/. The label of the task is left out if it does not fit.
    """
    labels = [(), (task,)] if byte_length(item_name(message_id, 0, (task,))) <= MAX_OWN else [()]
    return tuple(item_name(message_id, 0, label, priority) for priority in range(10) for label in reversed(labels))


def is_generated_id(message_id: str) -> bool:
    """Return whether an id has the form of those that qworker creates, which are the first fields of an item."""
    usual = _USUAL.fullmatch(f"_{message_id}_0")
    return usual is not None and usual.end(4) <= 121


def reason_name(item: str) -> str:
    """Return the name of the file with the reason of a failed item."""
    return f".{item}.reason"


# -- names too long for a lease, and ids chosen by their publishers ------------------------------------------------


def make_alias(name: str, stem: str, tries: int, priority: int = 0) -> tuple[str, str]:
    """Return an own name for a file whose name has no room for suffixes, and the key of the old one."""
    key = hashlib.sha256(os.fsencode(name)).hexdigest()
    return item_name(stem, tries, (f"{_ALIAS}{key}",), priority), key


def alias_target(arguments: tuple[str, ...]) -> str | None:
    """Return the key of the name that an item replaces, or None if it does not replace one."""
    if len(arguments) == 1 and len(arguments[0]) == 65 and arguments[0][0] == _ALIAS:
        return arguments[0][1:]
    return None


def byte_length(name: str) -> int:
    """Return the length of a name in bytes, as the file system counts."""
    return len(name) if name.isascii() else len(os.fsencode(name))


def given_id(item: str) -> str | None:
    """Return the id in an item's name if its publisher chose it, otherwise None. Cheaper than `parse_item`."""
    if _GIVEN not in item or item[0] not in _PRIORITIES:
        return None
    fields = item.split(item[0], 5)
    if len(fields) < 6 or fields[3] != "0" or not fields[4].startswith(_GIVEN):
        return None
    return _id(*fields[1:5])


def hold_end_ms(item: str) -> int | None:
    """Return the end of an item's hold, in Unix milliseconds, or None if its name has none. Cheap if it has none."""
    if _HOLD_MARK not in item:
        return None
    for mark in _marks(item, _HOLD):
        if _number(mark[1:]):
            return int(mark[1:])
    return None


def _replaced_ms(host: str) -> int | None:
    for mark in host.split(_MARK)[1:]:
        if mark[:1] == _REPLACED and _number(mark[1:]):
            return int(mark[1:])
    return None


def _marks(item: str, kind: str) -> list[str]:
    """Return the marks of a kind in an item's name."""
    if given_id(item) is None:
        return []
    return [mark for mark in item.split(item[0], 5)[4].split(_MARK)[1:] if mark[:1] == kind]


# -- unique keys -----------------------------------------------------------------------------------------------------


def key_mark(key: str, *, started: bool, app: bool = False) -> str:
    """Return the mark of a unique key.

    Args:
        key: The key.
        started: Whether it is free from the first lease of its message on.
        app: Whether it counts in all queues of the store. Then it is another key than that of one queue.
    """
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
    if app:
        digest = hashlib.sha256(digest + b"app").digest()
    text = base64.b32encode(digest).decode().lower()[:_KEY_DIGEST]
    return f"{_KEY}{text}{_IN_ALL_QUEUES if app else ''}{_FREE_WHEN_STARTED if started else ''}"


def mark_in(item: str) -> str | None:
    """Return the mark of the unique key in an item's name, or None if it has none. Cheap if it has none."""
    if _KEY_MARK not in item:
        return None
    return next((mark for mark in _marks(item, _KEY) if len(mark) > _KEY_DIGEST), None)


def has_key(item: str, mark: str) -> bool:
    """Return whether an item that waits or is leased has the key of a mark."""
    own = mark_in(item)
    if own is None or without_letters(own) != without_letters(mark):
        return False
    return _STARTED not in key_letters(own)


def key_letters(mark: str) -> str:
    """Return the letters of a mark."""
    return mark[_KEY_DIGEST + 1 :]


def is_app_mark(mark: str) -> bool:
    """Return whether the key of a mark counts in all queues of the store."""
    return _IN_ALL_QUEUES in key_letters(mark)


def is_started_mark(mark: str) -> bool:
    """Return whether the key of a mark is free from the first lease on."""
    return not {_FREE_WHEN_STARTED, _STARTED}.isdisjoint(key_letters(mark))


def without_letters(mark: str) -> str:
    """Return a mark without its letters."""
    return mark[: _KEY_DIGEST + 1]


def started_item(item: str) -> str:
    """Return the name of an item from its first lease on. It does not have a key any more that is free then."""
    return _with_letter(item, _FREE_WHEN_STARTED, _STARTED)


def restarted_item(item: str) -> str:
    """Return the name of an item that waits for its first lease again."""
    return _with_letter(item, _STARTED, _FREE_WHEN_STARTED)


def _with_letter(item: str, letter: str, other: str) -> str:
    mark = mark_in(item)
    if mark is None or letter not in key_letters(mark):
        return item
    changed = without_letters(mark) + key_letters(mark).replace(letter, other)
    return item.replace(_MARK + mark, _MARK + changed, 1)


def replacing_stem(item: str, moment: float, hold_ms: int | None, key_mark: str) -> str:
    """Return the first four fields of the item that takes the place of another one.

    It has the id of that one and its place in the order, and a name that no file had before.

    Args:
        item: The item that waits.
        moment: Unix seconds of the call that replaces it.
        hold_ms: The end of the hold of the new one, in Unix milliseconds; None without one. The later end counts.
        key_mark: The mark of its unique key.
    """
    stamp, entropy, _, host = item.split(item[0], 5)[1:5]
    message_id = given_id(item)
    assert message_id is not None, item
    ends = [end for end in (hold_ms, hold_end_ms(item)) if end is not None]
    stem = stem_for(message_id, f"{stamp}_{entropy[:9]}0_0", max(ends, default=None), key_mark)
    return f"{stem}{_MARK}{_REPLACED}{max(int(moment * 1000), (_replaced_ms(host) or 0) + 1)}"


def first_moment(item: str, *, local: bool) -> float | None:
    """Return when the first call was enqueued whose place an item has, in Unix seconds."""
    stamp, entropy = item.split(item[0], 3)[1:3]
    return _moment(stamp, entropy[:9], local)


def key_link_name(mark: str) -> str:
    """Return the name in names/ of the symlink to the message that has the key of a mark."""
    return f"key-{mark[1 : _KEY_DIGEST + 1]}"


def key_record_name(message_id: str) -> str:
    """Return the name in names/ of the record of a message's unique key."""
    return "unique-" + _digest(message_id)


def may_lack_link(message_id: str) -> bool:
    """Return whether a message with this id can be stored without a link in names/."""
    return _UNLINKED.fullmatch(message_id) is not None


def _digest(message_id: str) -> str:
    # A text that is searched can have lone surrogates.
    return hashlib.sha256(message_id.encode(errors="surrogatepass")).hexdigest()


def index_name(message_id: str) -> str:
    """Return the name in names/ of the second link of a message whose publisher chose its id."""
    return "id-" + _digest(message_id)


def swap_name(index: str) -> str:
    """Return the name in names/ of a file that is about to take the place of a waiting one, or of that one, after it.

    Args:
        index: The `index_name` of their id.
    """
    return f"swap-{index.partition('-')[2]}"


def next_name(index: str) -> str:
    """Return the name in names/ of the second link that the new file will have instead of the old one."""
    return f"next-{index.partition('-')[2]}"


def place_name(message_id: str) -> str:
    """Return the name in names/ of the record of such a message's place."""
    return "at-" + _digest(message_id)


def hold_name(message_id: str) -> str:
    """Return the name in names/ of the hold of an id."""
    return "hold-" + _digest(message_id)
