"""Pods come and go as a kubelet makes them, under load, and nothing is lost.

The manifest is that of examples/kubernetes/directory, with one change: some of its seconds pass faster.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qworker import Tasks
from tests.e2e.pods import Pod
from tests.support.waiting import wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes"
# Of the seconds for which a pod is quiet before it is told to end: they are long beside a handler's milliseconds.
PACE = 0.2
MESSAGES = 300

APP = """
import asyncio, os
from pathlib import Path
from qworker import Tasks
from qworker.retry import Backoff

tasks = Tasks()

def say(*words):
    # One write, so that lines of several processes do not mix.
    with open("journal", "ab", buffering=0) as journal:
        journal.write((" ".join(map(str, words)) + "\\n").encode())

POD = os.environ["POD"]

@tasks.task(max_tries=9, retry=Backoff(initial=0.01, maximum=0.01))
async def work(number: int) -> None:
    say("begin", number, POD)
    await asyncio.sleep(0.02)
    say("end", number, POD)

@tasks.task(max_tries=9, retry=Backoff(initial=0.01, maximum=0.01))
async def block(number: int) -> None:
    # Blocks the loop of the first pod that gets it, for ever.
    say("begin", number, POD)
    if not Path("blocked").exists():
        Path("blocked").touch()
        while True:
            pass
    say("end", number, POD)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Pod]]:
    spec = yaml.safe_load((EXAMPLE / "directory" / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pods: list[Pod] = []

    def begin(*more: str, pace: float = 1.0) -> Pod:
        arguments = list(container["args"])
        timeout = arguments.index("--shutdown-timeout") + 1
        arguments[timeout] = str(float(arguments[timeout]) * pace)
        arguments[arguments.index("-c") + 1] = "4"
        pod = Pod(
            folder,
            {**container, "args": [*arguments, *more]},
            grace=spec["terminationGracePeriodSeconds"],
            pace=pace,
            env={"QWORKER_URL": f"file://{folder}/queue", "POD": f"pod-{len(pods)}"},
            quiet=float(container["lifecycle"]["preStop"]["exec"]["command"][-1].rpartition(" ")[2]) * PACE / pace,
        )
        pods.append(pod)
        return pod

    yield begin
    for pod in pods:
        pod.discard()


def enqueue(folder: Path, *calls: tuple[str, int]) -> None:
    tasks = Tasks(f"file://{folder}/queue")

    @tasks.task
    async def work(number: int) -> None: ...

    @tasks.task
    async def block(number: int) -> None: ...

    asyncio.run(_enqueue(tasks, calls))


async def _enqueue(tasks: Tasks, calls: tuple[tuple[str, int], ...]) -> None:
    await tasks.enqueue_many(tasks[name].call(number) for name, number in calls)
    await tasks.aclose()


def journal(folder: Path) -> dict[str, list[list[str]]]:
    lines: dict[str, list[list[str]]] = defaultdict(list)
    path = folder / "journal"
    for line in path.read_text().splitlines() if path.exists() else ():
        event, number, pod = line.split()
        lines[event].append([number, pod])
    return lines


def ended(folder: Path) -> set[str]:
    return {number for number, _ in journal(folder)["end"]}


def left(folder: Path) -> list[str]:
    return [
        str(p) for state in ("queue", "lease", "delay", "fail") for p in (folder / "queue/default" / state).glob("*")
    ]


@pytest.mark.timeout(180)
def test_a_rolling_restart_under_load_loses_nothing_and_repeats_nothing(folder: Path, start: Any) -> None:
    enqueue(folder, *(("work", number) for number in range(MESSAGES)))
    old = [start(), start()]
    for pod in old:
        pod.wait_ready()
    enqueue(folder, *(("work", number) for number in range(MESSAGES, 2 * MESSAGES)))
    # maxSurge 1, maxUnavailable 0: a new one is ready before an old one goes.
    fresh = []
    for pod in old:
        fresh.append(start())
        fresh[-1].wait_ready()
        assert pod.stop() == 0, pod.process.text[-3000:]
        assert not pod.killed
    enqueue(folder, *(("work", number) for number in range(2 * MESSAGES, 3 * MESSAGES)))
    wanted = {str(number) for number in range(3 * MESSAGES)}
    wait_for(lambda: ended(folder) >= wanted, "all done", lambda: f"{len(ended(folder))} of {len(wanted)}")
    for pod in fresh:
        assert pod.stop() == 0, pod.process.text[-3000:]
    lines = journal(folder)
    assert {number for number, _ in lines["end"]} == wanted
    assert max(Counter(number for number, _ in lines["begin"]).values()) == 1, (
        "drained pods make nobody run anything twice"
    )
    assert not left(folder)


@pytest.mark.timeout(180)
def test_pods_that_are_killed_lose_nothing(folder: Path, start: Any) -> None:
    first = start("--stall-timeout", "1", pace=0.1)
    first.wait_ready()
    enqueue(folder, ("block", 0), *(("work", number) for number in range(1, MESSAGES)))
    wait_for(lambda: ["0", "pod-0"] in journal(folder)["begin"], "a blocked loop", lambda: first.process.text)
    # Its liveness probe fails, and it does not heed SIGTERM: the kubelet kills it when its time is up.
    first.wait_unhealthy()
    second = start()
    second.wait_ready()
    first.stop()
    assert first.killed
    third = start()
    third.wait_ready()
    # A node dies, with whatever runs there.
    enqueue(folder, *(("work", number) for number in range(MESSAGES, 2 * MESSAGES)))
    wait_for(lambda: any(int(number) >= MESSAGES for number, _ in journal(folder)["begin"]), "under load")
    second.kill()
    second.finish()
    enqueue(folder, *(("work", number) for number in range(2 * MESSAGES, 3 * MESSAGES)))
    wanted = {str(number) for number in range(3 * MESSAGES)}
    wait_for(
        lambda: ended(folder) >= wanted, "all done", lambda: f"{wanted - ended(folder)} {third.process.text[-2000:]}"
    )
    assert third.stop() == 0, third.process.text[-3000:]
    begun = Counter(number for number, pod in journal(folder)["begin"] if pod == "pod-2")
    assert max(begun.values()) == 1, "only what the killed pods had may run again"
    assert not left(folder)
