"""An inbox: count the words of each file that a program puts into a directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from qworker import Fail, Message, Tasks

RESULTS = Path("counted")

tasks = Tasks("file://./spool")


@tasks.raw_handler(queue="inbox", max_tries=3)
def on_file(message: Message) -> None:
    """Count the lines, words and bytes of a raw file, and write them to `counted/<its name>.json`.

    The argument of the message is the original name of the file. It comes from another program, so check it before you
    use it as a file name.
    """
    name = message.argv[0] if message.argv else message.id
    if name != os.path.basename(name) or name.startswith("."):
        raise Fail(f"{name!r} is not a plain file name")
    text = message.body.decode(errors="replace")
    counts = {"lines": text.count("\n"), "words": len(text.split()), "bytes": len(message.body)}
    RESULTS.mkdir(exist_ok=True)
    # The rename makes the write atomic. If the message runs twice, the result is the same.
    unfinished = RESULTS / f".{message.id}"
    unfinished.write_text(json.dumps(counts) + "\n")
    unfinished.rename(RESULTS / f"{name}.json")
    print(f"{name}: {counts['words']} words", flush=True)
