"""What a protocol does not support is refused before anything is stored."""

from __future__ import annotations

from typing import Any

import pytest

from qworker.backend.deviations import refuse_unsupported
from qworker.errors import NotSupported
from qworker.message import Draft

ASKED = {
    "priority": {"priority": 1},
    "unique_key": {"unique_key": "k"},
    "given_ids": {"id": "chosen"},
    "fields": {"fields": {"a": "b"}},
    "argv": {"argv": ("a",)},
    "delay": {"delay": 1.0},
    "empty_bodies": {"body": b""},
}


@pytest.mark.parametrize("rule", ASKED)
def test_each_deviation_refuses_what_asks_for_it_in_one_line_and_nothing_else(rule: str) -> None:
    drafts = {name: [_draft(**asked)] for name, asked in ASKED.items()}
    with pytest.raises(NotSupported, match=r"^x: does not support [^\n]+ \(because\): [^\n]+$"):
        refuse_unsupported("x", {rule: "because"}, drafts.pop(rule))
    for others in drafts.values():
        refuse_unsupported("x", {rule: "because"}, others)
    refuse_unsupported("x", {}, [_draft(**asked) for asked in ASKED.values()])


def test_a_message_for_a_time_asks_for_a_delay() -> None:
    with pytest.raises(NotSupported, match="delays"):
        refuse_unsupported("x", {"delay": "because"}, [_draft(due_at=1.0)])


def test_ids_of_the_protocols_own_form_can_be_given() -> None:
    refuse_unsupported("x", {"given_ids": "because"}, [_draft(id="12")], takes_id=str.isdigit)
    with pytest.raises(NotSupported, match="given ids"):
        refuse_unsupported("x", {"given_ids": "because"}, [_draft(id="ab")], takes_id=str.isdigit)


def _draft(**asked: Any) -> Draft:
    return Draft(**{"body": b"x", **asked})
