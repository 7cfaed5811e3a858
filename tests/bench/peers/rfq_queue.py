"""The rfq package: `rfq_queue.py PORT COUNT BATCH` prints microseconds per publish and per consume + commit.

Runs in an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time

from redis import Redis
from rfq.rfq import Queue


def main() -> None:
    """See the module."""
    port, count, batch = (int(value) for value in sys.argv[1:])
    queue = Queue(redis=Redis(port=port, decode_responses=True))
    body = {"qworker": "x" * 100}

    def publish(messages: int) -> None:
        for _ in range(0, messages, batch):
            if batch == 1:
                queue.publish("bench", body)
            else:
                queue.publish_batch("bench", [body] * batch)

    def consume(messages: int) -> None:
        for _ in range(messages):
            task = queue.consume("bench")
            assert task.result()
            task.done()

    publish(batch)
    consume(batch)
    began = time.perf_counter()
    publish(count)
    published = time.perf_counter() - began
    began = time.perf_counter()
    consume(count)
    consumed = time.perf_counter() - began
    print(json.dumps({"publish": published / count * 1e6, "consume": consumed / count * 1e6}))


main()
