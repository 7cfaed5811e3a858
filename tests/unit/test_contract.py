"""The members of the contract, and what its values promise."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from qworker.backend import Backend
from qworker.errors import UsageError
from qworker.message import FinishedMessage, Selection, State

# What a backend must do; each is abstract.
MEMBERS = {
    *("from_url", "open", "aclose", "describe", "durability"),
    "publish",
    *("lease", "wait", "extend", "settle", "reap"),
    "cells",
    *("queues", "create", "delete", "stats", "pause", "resume"),
    *("browse", "parts", "find", "requeue", "remove", "cancel"),
}
# What it may set; each has a value for a store that has nothing to say.
ATTRIBUTES = {"deviations", "shared", "directory", "remote_leases", "history", "max_body"}

ONE = FinishedMessage(id="x", state=State.FAILED, finished_at=1.0)


def test_the_contract_has_24_members_and_none_has_a_default() -> None:
    public = {name for name in vars(Backend) if not name.startswith("_")}
    assert public == MEMBERS | ATTRIBUTES
    assert len(MEMBERS) == 24
    assert Backend.__abstractmethods__ == MEMBERS


def test_each_member_says_what_it_does() -> None:
    assert all(inspect.getdoc(vars(Backend)[name]) for name in MEMBERS)


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
