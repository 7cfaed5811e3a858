"""C6 and C7: holders that sleep through their leases, and clocks that jump."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qworker.backend.registry import open_backend
from qworker.message import Draft
from qworker.testing.wait_until import wait_until
from tests.fault import harness
from tests.fault.harness import PATIENCE, QUEUE
from tests.fault.programs import Ledger, publish
from tests.support.processes import pause

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

# Holds leases, tells so, and settles them when a line arrives: by then it has been stopped for two visibilities.
HOLDER = """
import asyncio, json, sys
from qworker.message import SettleAction, Settlement
from qworker.backend.registry import open_backend

async def main(url, queue, limit, visibility):
    backend = open_backend(url)
    leases = await backend.lease(queue, limit, visibility)
    print(json.dumps([lease.message.id for lease in leases]), flush=True)
    sys.stdin.readline()
    lost = backend.extend(leases[:2], visibility)
    refused = await backend.settle([Settlement(lease=lease, action=SettleAction.ACK) for lease in leases])
    print(json.dumps([len(lost), len(refused)]), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
"""


async def test_100_leases_that_outlived_their_holder_are_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/spool"
    backend = open_backend(url)
    for _ in range(5):
        ids = await backend.publish(QUEUE, [Draft(body=b"x") for _ in range(20)])
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, url, QUEUE, "20", "0.3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert holder.stdin is not None
            assert holder.stdout is not None
            held = json.loads(await asyncio.to_thread(holder.stdout.readline))
            assert sorted(held) == sorted(ids)
            pause(holder.pid)
            taken: list[str] = []

            async def take_all(taken: list[str] = taken) -> bool:
                await backend.reap(QUEUE)
                leases = await backend.lease(QUEUE, 20, 30.0)
                assert all(lease.message.tries == 1 for lease in leases)
                taken.extend(lease.message.id for lease in leases)
                assert await backend.settle([harness.ack(lease) for lease in leases]) == []
                return len(taken) >= 20

            await wait_until(take_all, PATIENCE)
            os.kill(holder.pid, signal.SIGCONT)
            holder.stdin.write("\n")
            holder.stdin.flush()
            lost, refused = json.loads(await asyncio.to_thread(holder.stdout.readline))
            assert (lost, refused) == (2, 20)
        finally:
            holder.kill()
            holder.communicate()
        assert sorted(taken) == sorted(ids)
    await backend.aclose()


FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


@pytest.mark.parametrize("jump", ["+3600", "-3600"])
async def test_a_clock_that_jumps_an_hour_takes_no_live_lease(tmp_path: Path, jump: str) -> None:
    url, ledger, offset = f"file://{tmp_path}/spool", tmp_path / "ledger", tmp_path / "offset"
    offset.write_text("+0\n")
    env = {
        "LD_PRELOAD": FAKETIME,
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    backend = open_backend(url)
    await backend.publish(QUEUE, [Draft(body=b"held", id="held")])
    # Longer than the other process takes on a busy machine, and shorter than the jump.
    (lease,) = await backend.lease(QUEUE, 1, 600.0)
    await publish(url, Ledger(ledger), 5, 5)
    # Another host's worker, whose clock is an hour off: it reaps every second while it looks for work.
    other = harness.start("watch", url, ledger, env=env)
    try:
        await wait_until(lambda: len(set(harness.Books(ledger).finished)) >= 5, PATIENCE)
        offset.write_text(f"{jump}\n")
        seen = len(harness.Books(ledger).read("reaps"))
        await wait_until(lambda: len(harness.Books(ledger).read("reaps")) >= seen + 4, PATIENCE)
    finally:
        harness.kill(other)
    assert "held" not in harness.Books(ledger).finished
    assert backend.extend([lease], 60.0) == []
    assert await backend.settle([harness.ack(lease)]) == []
    await backend.aclose()
