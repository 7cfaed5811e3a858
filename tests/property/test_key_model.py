"""The model of unique keys in a directory: never two pending, never taken for ever, whichever process dies where."""

from __future__ import annotations

import pytest

from tests.property.key_model import Broken, Rules, explore


@pytest.mark.parametrize("publishers", [1, 2, 3])
def test_at_most_one_message_of_a_key_is_pending_and_no_death_leaves_the_key_taken(publishers: int) -> None:
    assert explore(publishers, Rules()) > 10


@pytest.mark.parametrize("rule", Rules._fields)
def test_each_rule_of_the_protocol_is_needed(rule: str) -> None:
    with pytest.raises(Broken, match="two are pending"):
        explore(3, Rules(**{rule: False}))
