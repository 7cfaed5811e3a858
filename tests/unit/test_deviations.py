"""What a protocol does not support is refused before anything is stored."""

from __future__ import annotations

from typing import Any

import pytest

from qworker.backend import Backend
from qworker.backend.deviations import refuse_unsupported
from qworker.backend.registry import backend_class, open_backend, schemes
from qworker.errors import NotSupported
from qworker.message import Draft
from qworker.testing.clock import FakeClock
from qworker.url import BackendURL
from qworker_mq.standard_server import StandardServerBackend
from tests.support.serving import served

ASKED = {
    "priority": {"priority": 1},
    "unique_key": {"unique_key": "k"},
    "given_ids": {"id": "chosen"},
    "hold": {"id": "chosen", "hold": 1.0},
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
    if rule == "given_ids":
        # A hold needs an id.
        del drafts["hold"]
    for others in drafts.values():
        refuse_unsupported("x", {rule: "because"}, others)
    refuse_unsupported("x", {}, [_draft(**asked) for asked in ASKED.values()])


@pytest.mark.parametrize("draft", [{"due_at": 11.0}, {"due_at": 11.0, "delay": 1.0}, {"delay": 1.0}])
def test_a_message_for_a_later_time_asks_for_a_delay(draft: dict[str, Any]) -> None:
    with pytest.raises(NotSupported, match="delays"):
        refuse_unsupported("x", {"delay": "because"}, [_draft(**draft)], now=10.0)


@pytest.mark.parametrize("draft", [{"due_at": 9.0}, {"due_at": 10.0}, {"due_at": 9.0, "delay": 1.0}, {}])
def test_a_message_for_a_time_that_has_passed_asks_for_no_delay(draft: dict[str, Any]) -> None:
    refuse_unsupported("x", {"delay": "because"}, [_draft(**draft)], now=10.0)
    with pytest.raises(NotSupported, match="delays"):
        refuse_unsupported("x", {"delay": "because"}, [_draft(**draft), _draft(due_at=10.5)], now=10.0)


def _without_delays() -> list[type[Backend]]:
    found: set[type[Backend]] = {*map(backend_class, schemes()), StandardServerBackend}
    return [kind for kind in found if "delay" in kind.deviations]


@pytest.mark.parametrize("kind", _without_delays())
async def test_every_backend_without_delays_publishes_what_was_due_already(kind: type[Backend]) -> None:
    clock = FakeClock()
    with served(open_backend("memory://due-already", clock=clock), additions=False) as server:
        # All of them are reached over HTTP.
        url = BackendURL.parse(f"mq+http://127.0.0.1:{server.port}?standard_only=1")
        backend = kind.from_url(url, clock=clock)
        await backend.publish("q", [_draft(due_at=clock.time() - 1.0), _draft(due_at=clock.time())])
        with pytest.raises(NotSupported, match="delays"):
            await backend.publish("q", [_draft(due_at=clock.time() + 1.0)])
        assert len(await backend.lease("q", 5, 100.0)) == 2
        await backend.aclose()


def test_ids_of_the_protocols_own_form_can_be_given() -> None:
    refuse_unsupported("x", {"given_ids": "because"}, [_draft(id="12")], takes_id=str.isdigit)
    with pytest.raises(NotSupported, match="given ids"):
        refuse_unsupported("x", {"given_ids": "because"}, [_draft(id="ab")], takes_id=str.isdigit)


def _draft(**asked: Any) -> Draft:
    return Draft(**{"body": b"x", **asked})
