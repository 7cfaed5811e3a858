"""What the contract's values promise."""

from __future__ import annotations

from typing import Any

import pytest

from qworker.errors import UsageError
from qworker.message import FinishedMessage, Selection, State

ONE = FinishedMessage(id="x", state=State.FAILED, finished_at=1.0)


@pytest.mark.parametrize(
    "form", [{"ids": []}, {"ids": ["x"]}, {"state": State.READY}, {"unchanged": []}, {"unchanged": [ONE]}]
)
def test_a_selection_has_one_form(form: dict[str, Any]) -> None:
    selection = Selection(**form)
    assert Selection.from_json(selection.to_json()) == selection


def test_json_has_the_words_of_the_states() -> None:
    assert Selection(state=State.FAILED).to_json() == {"state": "failed"}
    assert Selection(unchanged=[ONE]).to_json()["unchanged"][0]["state"] == "failed"


@pytest.mark.parametrize("forms", [{}, {"ids": [], "state": State.FAILED}, {"ids": ["x"], "unchanged": [ONE]}])
def test_a_selection_with_no_form_or_with_several_is_refused(forms: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="exactly one of ids, state and unchanged"):
        Selection(**forms)
