"""The contract of the URL option `max_body`."""

from __future__ import annotations

import pytest

from qworker.errors import InvalidURL, MessageTooLarge
from qworker.message import Draft
from qworker.testing.base import Contract
from qworker.testing.harness import Case
from qworker.testing.rules import rule

__all__ = ["MaxBodyContract"]


async def the_option_is_refused(case: Case) -> None:
    """Prove a deviation from `max_body`."""
    with pytest.raises(InvalidURL) as caught:
        case.harness.make(max_body="1KiB")
    assert "max_body" in str(caught.value)


async def larger_messages_are_leased(case: Case) -> None:
    """Prove a deviation from `max_body_stored`."""
    await case.publish(b"small", b"x" * 2000)
    assert await case.leased_bodies() == [b"small", b"x" * 2000]


class MaxBodyContract(Contract):
    """The tests of `max_body`."""

    @rule("max_body", otherwise=the_option_is_refused)
    async def test_a_body_larger_than_max_body_is_refused_with_its_whole_batch(self, case: Case) -> None:
        limited = await case.open(max_body="1KiB")
        assert limited.max_body == 1024
        await case.backend.create(case.queue)
        with pytest.raises(MessageTooLarge, match=r"1025 bytes.*max_body=1KiB") as caught:
            await limited.publish(case.queue, [Draft(body=b"small"), Draft(body=b"x" * 1025)])
        assert "\n" not in str(caught.value)
        assert await case.counts() == (0, 0, 0, 0)

    @rule("max_body", otherwise=the_option_is_refused)
    async def test_a_body_as_large_as_max_body_is_published_and_leased(self, case: Case) -> None:
        await case.backend.aclose()
        limited = await case.open(max_body="1KiB")
        await limited.publish(case.queue, [Draft(body=b"x" * 1024)])
        assert [lease.message.body for lease in await case.lease(by=limited)] == [b"x" * 1024]

    @rule("max_body", otherwise=the_option_is_refused)
    async def test_max_body_can_be_lifted(self, case: Case) -> None:
        assert (await case.open(max_body="none")).max_body is None

    @rule("max_body_stored", otherwise=larger_messages_are_leased)
    async def test_a_larger_message_that_is_stored_does_not_keep_others_from_running(self, case: Case) -> None:
        limited = await case.open(max_body="1KiB")
        await case.publish(b"first", b"x" * 1025, b"y" * 3000, b"second", b"z" * 2000)
        leased: list[bytes] = []
        for _ in range(6):
            leased += [lease.message.body for lease in await case.lease(1, by=limited)]
        assert leased == [b"first", b"second"]
        stats = await case.stats()
        assert stats.ready + stats.delayed == 3

    @rule("max_body_stored", otherwise=larger_messages_are_leased)
    async def test_a_larger_message_that_is_stored_runs_where_max_body_is_larger(self, case: Case) -> None:
        limited = await case.open(max_body="1KiB")
        await case.publish(b"x" * 1025)
        assert await case.lease(by=limited) == []
        await case.harness.advance(700.0)
        assert await case.leased_bodies() == [b"x" * 1025]
