"""The log on a terminal: one line for each event, in the order in which a person reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import structlog

from qworker import logs

TIME = r"\d\d:\d\d:\d\d"


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    logs.configure(json=False, level="debug")
    yield
    structlog.reset_defaults()


def test_a_line_is_the_time_the_level_the_event_and_the_message_then_the_error_and_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = structlog.get_logger().bind(worker="host-1")
    log.error("message_failed", message_id="m-1", task="mail", tries=2, token=7, error="\x1b[31mred\nnew line")
    log.info("worker_draining", running=0)
    failed, draining = capsys.readouterr().err.splitlines()
    message = r"\[error    \] message_failed    mail m-1 +error='\?\[31mred\?new line' tries=2 token=7 worker=host-1"
    assert re.fullmatch(f"{TIME} {message}", failed)
    assert re.fullmatch(rf"{TIME} \[info     \] worker_draining +running=0 worker=host-1", draining)
