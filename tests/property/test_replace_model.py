"""The model of the exchange that replaces a waiting message: none is lost, and never two have the key."""

from __future__ import annotations

import pytest

from tests.property.replace_model import Broken, Rules, explore


def test_a_message_is_replaced_or_runs_whenever_the_publisher_dies() -> None:
    assert explore(Rules()) > 50


@pytest.mark.parametrize(
    ("rule", "problem"),
    [("exchanges", "two are pending"), ("compares_files", "one is lost"), ("links_before", "two are pending")],
)
def test_each_rule_of_the_exchange_is_needed(rule: str, problem: str) -> None:
    with pytest.raises(Broken, match=problem):
        explore(Rules(**{rule: False}))
