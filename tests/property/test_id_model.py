"""One id that two processes publish: every state of a small model, with deaths and a backup made of hard links."""

from __future__ import annotations

import pytest

from tests.property.id_model import Broken, IdRules, explore_ids, start_ids

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(("crashes", "backups"), [(0, 0), (2, 0), (1, 1)])
def test_an_id_is_stored_once_with_deaths_and_backups_anywhere(crashes: int, backups: int) -> None:
    assert explore_ids(start_ids(crashes, backups), IdRules()) > 500


@pytest.mark.parametrize(("crashes", "backups"), [(2, 0), (1, 1)])
def test_an_id_with_a_hold_is_shown_once_and_is_never_reported_without_being_shown(crashes: int, backups: int) -> None:
    assert explore_ids(start_ids(crashes, backups), IdRules(hold="lease")) > 500


@pytest.mark.parametrize(
    ("rules", "counterexample"),
    [
        (IdRules(links_prove=True), "reported, not stored"),
        (IdRules(record_proves=True), "reported, not stored"),
        (IdRules(check_moves=False), "stored twice"),
        (IdRules(hold="publish"), "held, never shown"),
        (IdRules(hold="ack"), "shown twice"),
        (IdRules(hold="none"), "shown twice"),
    ],
)
def test_the_search_finds_what_each_rule_prevents(rules: IdRules, counterexample: str) -> None:
    with pytest.raises(Broken, match=counterexample):
        explore_ids(start_ids(1, 1), rules)
