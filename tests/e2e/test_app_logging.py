"""What an app logs with the standard library, in a real worker and in its handlers' processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import started

APP = """
import logging, sys
from qworker import Tasks

tasks = Tasks("file://./spool")
log = logging.getLogger("shop")

@tasks.task
async def on_the_loop() -> None:
    log.info("async")

@tasks.task
def in_a_thread() -> None:
    log.info("thread")

@tasks.task(process=True)
def in_a_process() -> None:
    log.info("process")
    log.debug("not shown")
    print("flags", sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions, flush=True)

def enqueue():
    for task in (on_the_loop, in_a_thread, in_a_process):
        task.enqueue_sync()
"""

OWN = "import logging; logging.basicConfig(format='mine: %(message)s', level='INFO')\n"


def run(folder: Path, app: str, *arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    (folder / "app.py").write_text(app)
    with started(folder, program=("-c", "import app; app.enqueue()")) as process:
        assert process.end() == 0, process.text
    program = (*flags, "-m", "qworker")
    with started(folder, "run", "app:tasks", "--burst", *arguments, program=program) as process:
        assert process.end() == 0, process.text
        return list(process.lines)


def test_every_kind_of_handler_is_shown_with_its_message(tmp_path):
    told = [json.loads(line) for line in run(tmp_path, APP) if '"logger":"shop"' in line]
    found = {line["event"]: line for line in told}
    assert set(found) == {"async", "thread", "process"}
    for name, task in {"async": "on_the_loop", "thread": "in_a_thread", "process": "in_a_process"}.items():
        line = found[name]
        assert (line["task"], line["queue"], line["level"], line["tries"]) == (task, "default", "info", 0)
    assert len({line["message_id"] for line in told}) == 3


def test_logging_of_the_apps_own_is_left_as_it_is(tmp_path):
    lines = run(tmp_path, OWN + APP)
    assert sorted(line for line in lines if "mine" in line) == ["mine: async", "mine: process", "mine: thread"]
    assert not [line for line in lines if '"logger":"shop"' in line]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_handlers_processes_run_with_the_flags_of_their_worker(tmp_path, workers):
    flags = ("-O", "-X", "dev", "-W", "error::UserWarning")
    (line,) = [line for line in run(tmp_path, APP, "-w", workers, flags=flags) if line.startswith("flags")]
    assert line == "flags 1 True ['default', 'error::UserWarning']"
