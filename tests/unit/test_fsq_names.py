"""Names of fsq items: each written name is read back, and each name that is not valid is refused."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from qworker.errors import NotSupported, UsageError
from qworker.names import check_id
from qworker_fsq.environment import Constants
from qworker_fsq.names import InvalidItemName, construct, deconstruct, message_id, parse, with_tries

USUAL = Constants()
# Characters that mean something in names, more often.
TEXT = st.text(
    st.one_of(st.sampled_from("_%/.,+-5fF é"), st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
)
FIELDS = st.lists(TEXT, max_size=4)
PUNCTUATION = st.sampled_from("_%,+-~:5fA")
FILE_NAMES = st.binary(min_size=1).filter(lambda name: b"/" not in name and b"\0" not in name).map(os.fsdecode)


@st.composite
def constants(draw: st.DrawFn) -> Constants:
    delimiter, escape = draw(st.tuples(PUNCTUATION, PUNCTUATION).filter(lambda pair: pair[0] != pair[1]))
    return Constants(delimiter=delimiter, encode=escape)


def written(arguments: list[str], known: Constants, tries: int = 0) -> str:
    try:
        return construct(("20261123043156", "123456789", "42", "vm", str(tries), *arguments), known)
    except NotSupported:
        # Too long for a file's name.
        reject()


@given(FIELDS, constants(), st.integers(0, 999_999_999))
def test_an_item_is_read_as_it_was_named(arguments: list[str], known: Constants, tries: int) -> None:
    name = written(arguments, known, tries)
    assert "/" not in name
    assert name[0] == known.delimiter
    assert len(os.fsencode(name)) <= 255
    item = parse(name, known)
    assert (item.tries, list(item.arguments)) == (tries, arguments)
    assert (item.entropy, item.pid, item.hostname) == ("123456789", "42", "vm")
    # Whoever reads it takes the delimiter from the name.
    other = Constants(delimiter="!", encode=known.encode)
    assert parse(name, other).arguments == tuple(arguments)


@given(FIELDS)
def test_the_short_way_to_read_a_name_reads_the_same(arguments: list[str]) -> None:
    name = written(arguments, USUAL)
    # Another spelling of the charset takes the long way.
    assert parse(name, USUAL) == parse(name, Constants(charset="utf-8"))


@given(FIELDS, constants(), st.integers(0, 10**6))
def test_a_retry_changes_nothing_but_the_tries(arguments: list[str], known: Constants, tries: int) -> None:
    name = written(arguments, known)
    again = with_tries(name, tries, known)
    before, after = parse(name, known), parse(again, known)
    assert after.tries == tries
    assert (after.id, after.arguments, after.enqueued_at) == (before.id, before.arguments, before.enqueued_at)


@given(FILE_NAMES, constants())
def test_any_file_has_an_id_and_is_an_item_or_malformed(name: str, known: Constants) -> None:
    check_id(message_id(name, known))
    try:
        item = parse(name, known)
    except InvalidItemName:
        return
    assert item.id == message_id(name, known)
    assert parse(with_tries(name, item.tries + 1, known), known).id == item.id


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("_a_b", ["a", "b"]),
        ("_", [""]),
        (",a_b,c", ["a_b", "c"]),
        ("_a%5fb%5Fc%2f%25", ["a_b_c/%"]),
        ("_%255f", ["%5f"]),
        ("_caf%c3%a9", ["café"]),
        ("5%35a5b", ["5a", "b"]),
    ],
)
def test_names_are_taken_apart_as_the_standard_says(name: str, fields: list[str]) -> None:
    assert deconstruct(name, USUAL) == fields


@pytest.mark.parametrize(
    "name",
    [
        "stranger",
        "%2013",
        "_20131005205643_0_1_host_0_%",
        "_20131005205643_0_1_host_0_%5",
        "_20131005205643_0_1_host_0_%zz",
        "_20131005205643_0_1_host_0_%%41",
        "_20131005205643_0_1_host",
        "_20131005205643_0_1_host_x",
        "_20131005205643_0_1_host_-1",
        "_20131005205643_0_1_host_٣",
        "_yesterday_0_1_host_0",
        "_99999999999999_0_1_host_0",
        "é20131005205643é0é1éhosté0",
    ],
)
def test_a_malformed_name_is_none(name: str) -> None:
    with pytest.raises(InvalidItemName):
        parse(name, USUAL)


def test_an_argument_that_no_file_name_can_hold_is_refused() -> None:
    for argument in ("x" * 250, "\0", "é" * 120):
        with pytest.raises(NotSupported):
            construct(("20261123043156", "1", "1", "vm", "0", argument), USUAL)


def test_another_charset_is_written_and_read() -> None:
    known = Constants(charset="latin1")
    name = written(["café"], known)
    assert name is not None
    assert os.fsencode(name).endswith(b"caf\xe9")
    assert parse(name, known).arguments == ("café",)
    with pytest.raises(NotSupported):
        construct(("1", "1", "1", "vm", "0", "日本"), known)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FSQ_QUEUE", "a/b"),
        ("FSQ_DONE", ".."),
        ("FSQ_DELIMITER", "ab"),
        ("FSQ_DELIMITER", "%"),
        ("FSQ_DELIMITER", "."),
        ("FSQ_ENCODE", "/"),
        ("FSQ_ITEM_MODE", "rw"),
        ("FSQ_MAX_TRIES", "-1"),
        ("FSQ_LOCK", "yes"),
        ("FSQ_CHARSET", "klingon"),
        ("FSQ_ROOT", ""),
    ],
)
def test_a_variable_that_makes_no_sense_is_one_line(variable: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        Constants.from_environment({variable: value})
    assert "FSQ_" in str(caught.value)
    assert "\n" not in str(caught.value)
