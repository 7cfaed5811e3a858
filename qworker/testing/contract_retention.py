"""The contract of the URL option `keep_done`."""

from __future__ import annotations

import pytest

from qworker.errors import InvalidURL
from qworker.message import SettleAction, State
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["KeepingContract"]


async def acked_messages_are_gone(case: Case) -> None:
    """Prove a deviation from `keep_done`."""
    with pytest.raises(InvalidURL) as caught:
        case.harness.make(keep_done="all")
    assert "keep_done" in str(caught.value)
    assert "\n" not in str(caught.value)
    (message_id,) = await case.publish(b"x")
    assert await case.settle(await case.lease_one(), SettleAction.ACK)
    assert await case.state(message_id) is None
    assert await case.browse(State.DONE) == []


class KeepingContract(Contract):
    """The tests of `keep_done`."""

    @rule("keep_done", otherwise=acked_messages_are_gone)
    async def test_acked_messages_are_kept_as_done_where_the_url_says_so(self, case: Case) -> None:
        keeping = await case.open(keep_done="all")
        (message_id,) = await case.publish(b"x")
        assert await case.settle(await case.lease_one(by=keeping), SettleAction.ACK, by=keeping)
        assert await case.state(message_id) is State.DONE
        assert await case.browse(State.DONE) == [b"x"]
        assert (await case.stats()).done == 1

    @rule("keep_done", otherwise=acked_messages_are_gone)
    async def test_acked_messages_are_gone_where_the_url_says_so(self, case: Case) -> None:
        dropping = await case.open(keep_done="none")
        (message_id,) = await case.publish(b"x")
        assert await case.settle(await case.lease_one(by=dropping), SettleAction.ACK, by=dropping)
        assert await case.state(message_id) is None
        assert (await case.stats()).done == 0

    @rule("keep_done", otherwise=acked_messages_are_gone)
    @pytest.mark.parametrize("text", ["0", "1", "1000"])
    async def test_a_bare_number_is_refused_with_the_four_forms(self, case: Case, text: str) -> None:
        with pytest.raises(InvalidURL, match="use none, all, an age such as 7d, or a number of messages"):
            case.harness.make(keep_done=text)
