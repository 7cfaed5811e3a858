"""The names of the native directory: what is written is read back, and no name is too strange to be read."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidName
from qworker.names import check_id, new_id
from qworker_file.names import (
    LAST_DUE_MS,
    MAX_OWN,
    alias_target,
    delay_name,
    first_moment,
    has_key,
    hold_end_ms,
    index_name,
    is_delay_name,
    item_name,
    key_mark,
    lease_name,
    make_alias,
    parse_delay,
    parse_id,
    parse_item,
    parse_lease,
    replacing_stem,
    stem_for,
    with_tries,
)

# What an argument may hold: any text that a file system can keep, with the characters that mean something in names more
# often.
ARGUMENTS = st.lists(st.text(st.one_of(st.sampled_from("_%/.~-\0é"), st.characters(exclude_categories=["Cs"]))))
IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,119}", fullmatch=True)
FILE_NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
MILLISECONDS = st.integers(0, 10**13)


@given(ARGUMENTS, st.integers(0, 10**6))
def test_an_item_is_read_as_it_was_named(arguments: list[str], tries: int) -> None:
    message_id = new_id()
    name = item_name(message_id, tries, arguments)
    assert "/" not in name
    assert "\0" not in name
    item = parse_item(name)
    assert item is not None
    assert (item.id, item.tries, list(item.arguments)) == (message_id, tries, arguments)
    assert parse_id(name) == message_id


@given(IDS, ARGUMENTS)
def test_a_chosen_id_is_read_back(message_id: str, arguments: list[str]) -> None:
    name = item_name(stem_for(message_id, new_id()), 3, arguments)
    item = parse_item(name)
    assert item is not None
    assert item.id == parse_id(name) == message_id
    assert item.tries == 3
    assert item.is_own


@given(IDS, st.integers(1, 10**12), st.integers(1, 10**12))
def test_an_item_in_the_place_of_another_keeps_its_id_and_order_and_is_not_of_one_file_only(
    message_id: str, hold_ms: int, moment: int
) -> None:
    first = item_name(stem_for(message_id, new_id(), hold_ms, key_mark("k", started=False)), 2, ("task",))
    names = [first]
    for _ in range(2):
        # At the same time, too, no name is used twice.
        names.append(item_name(replacing_stem(names[-1], moment, hold_ms + 1, key_mark("k", started=True)), 0))
    assert len(set(names)) == 3
    for name in names[1:]:
        item = parse_item(name)
        assert item is not None
        assert (item.id, item.is_own) == (message_id, False)
        assert abs((item.enqueued_at or 0) - moment) < 0.01
        assert first_moment(name, local=False) == getattr(parse_item(first), "enqueued_at", None)
        assert (hold_end_ms(name), has_key(name, key_mark("k", started=False))) == (hold_ms + 1, True)
        assert name[:25] == first[:25]


@given(IDS)
def test_a_chosen_id_leaves_room_for_the_suffix_of_a_lease(message_id: str) -> None:
    name = item_name(stem_for(message_id, new_id()), 999_999)
    assert len(name.encode()) <= MAX_OWN


@pytest.mark.parametrize("hostile", ["", ".", "..", "../x", "a/b", "a\0b", "_a", "-a", "a" * 121, "é", "a b", "a%2fb"])
def test_a_hostile_id_becomes_no_name(hostile: str) -> None:
    with pytest.raises(InvalidName):
        stem_for(hostile, new_id())


@given(FILE_NAMES)
def test_any_name_is_an_item_with_an_allowed_id_or_none(name: str) -> None:
    item = parse_item(name)
    assert item is None or (check_id(item.id), parse_id(name)) == (item.id, item.id)
    if item is not None:
        again = parse_item(with_tries(name, item.tries + 1))
        assert again is not None
        assert (again.id, again.tries, again.arguments) == (item.id, item.tries + 1, item.arguments)


@given(FILE_NAMES, MILLISECONDS, st.from_regex(r"[A-Za-z0-9-]{1,40}", fullmatch=True))
def test_a_lease_is_read_from_the_right(item: str, expiry: int, holder: str) -> None:
    assert parse_lease(lease_name(item, expiry, holder)) == (item, expiry, holder)


@given(FILE_NAMES, MILLISECONDS)
def test_a_delay_is_read_from_the_left(item: str, due: int) -> None:
    name = delay_name(item, due)
    assert parse_delay(name) == (min(due, LAST_DUE_MS), item)
    assert is_delay_name(name)


@given(FILE_NAMES)
def test_a_strangers_name_in_lease_or_delay_does_no_harm(name: str) -> None:
    for parsed in (parse_lease(name), parse_delay(name)):
        assert parsed is None or all(part != "" for part in parsed)


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=2))
def test_delayed_messages_sort_by_their_due_time(due: list[int]) -> None:
    names = [delay_name("_x", moment) for moment in due]
    assert (names[0] < names[1]) == (due[0] < due[1])


@given(FILE_NAMES)
def test_an_alias_is_short_and_leads_to_its_name(name: str) -> None:
    alias, key = make_alias(name, new_id(), 2)
    assert len(os.fsencode(alias)) <= MAX_OWN
    item = parse_item(alias)
    assert item is not None
    assert alias_target(item.arguments) == key


def test_ids_rise_with_the_names_they_make() -> None:
    names = [item_name(new_id(), 0, ["z"]) for _ in range(1000)]
    assert names == sorted(set(names))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_20261121082028_5_13635_vm_0_a%5fb_100%25_x%2fy_", ("a_b", "100%", "x/y", "")),
        ("_20261121082028_5_13635_vm_0_a%5Fb", ("a_b",)),
        ("_20261121082028_6_13635_vm_0_café", ("café",)),
        ("_20261121082028_7_13635_vm_0", ()),
        ("-20261121082028-7-13635-vm-0-a_b", ("a_b",)),
        ("_20261121082028_7_13635_vm_0_%c3%a9", ("é",)),
    ],
)
def test_items_of_other_programs_are_read(name: str, arguments: tuple[str, ...]) -> None:
    item = parse_item(name)
    assert item is not None
    assert item.arguments == arguments
    assert item.enqueued_at == 1_795_249_228.0


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "README.txt",
        "_20261121082028_x_13635_vm_0",
        "_20261121082028_5_13635_vm",
        "_20261121082028_5_13635_vm_-1",
        "_20261121082028_5_13635_vm_0_a%5",
        "_20261121082028_5_13635_vm_0_a%zz",
        "_20261121082028_5_13635__0",
        "_20261121082028_5_13635_vm_٣",
        "." * 40,
        "_" * 40,
    ],
)
def test_what_is_malformed_is_no_item(name: str) -> None:
    assert parse_item(name) is None


def test_the_index_of_a_chosen_id_is_a_plain_name() -> None:
    assert index_name("a:b").isascii()
    assert "/" not in index_name("a" * 120)
    assert len(index_name("a" * 120)) < 100


def test_deaths_are_zeros_in_front_of_the_tries_which_other_programs_skip():
    name = item_name("20260101000000_123456789_1_host-abcd1234", 0)
    assert with_tries(name, 0) == name
    marked = with_tries(name, 3, 2)
    assert marked.split("_")[5] == "003"
    assert parse_id(marked) == parse_id(name)
    item = parse_item(marked)
    assert item is not None
    assert (item.tries, item.deaths) == (3, 2)
    assert with_tries(marked, 4).split("_")[5] == "4"
    assert with_tries(marked, 40, 40).split("_")[5] == "000000040"


def test_zeros_of_other_programs_are_no_more_deaths_than_tries():
    found = [parse_item(f"_20260101000000_123456789_1_host_{tries}") for tries in ("0", "000", "0001", "10")]
    assert [(item.tries, item.deaths) for item in found if item is not None] == [(0, 0), (0, 0), (1, 1), (10, 0)]
