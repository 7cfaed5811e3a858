"""An inbox: whatever any program drops into a folder is counted, once, durably."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qworker import Fail, Message, Tasks

RESULTS = Path("counted")

tasks = Tasks("file://./spool")


@tasks.raw_handler(queue="inbox", max_tries=3)
def on_file(message: Message) -> None:
    """Count a dropped file's lines, words and bytes into `counted/<its name>.json`.

    A file that no qworker wrote has its old name as the message's argument. It is a stranger's text, so it is used as a
    file name only once it has been seen to be one.
    """
    name = message.argv[0] if message.argv else message.id
    if name != os.path.basename(name) or name.startswith("."):
        raise Fail(f"{name!r} is no plain file name")
    text = message.body.decode(errors="replace")
    counts = {"lines": text.count("\n"), "words": len(text.split()), "bytes": len(message.body)}
    RESULTS.mkdir(exist_ok=True)
    # Written whole or not at all, and the same when the message runs twice.
    unfinished = RESULTS / f".{message.id}"
    unfinished.write_text(json.dumps(counts) + "\n")
    unfinished.rename(RESULTS / f"{name}.json")
    print(f"{name}: {counts['words']} words", flush=True)
