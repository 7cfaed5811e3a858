"""Run the rfq 1.4.0 package, with a Python that has it, on the Redis of RFQ_REDIS_HOST and RFQ_REDIS_PORT.

rfq_peer.py commands      runs the package's command for each line of standard input, a JSON list of arguments, and
                          prints [exit status, output] as JSON. The command itself does not have `publish-many PREFIX
                          COUNT TOPIC`, which publishes {"k": PREFIX + number}, and the halves of a consumption, `hold
                          TOPIC` and `commit TOPIC ID`.
rfq_peer.py consume TOPIC prints the k of each message, works on it for a moment, and commits it, until it is killed.
"""

import contextlib
import io
import json
import sys
import time

from rfq.consume import commit
from rfq.rfq import Queue
from rfq.scripts.__main__ import main


def publish(prefix: str, count: str, topic: str) -> None:
    for number in range(int(count)):
        print(Queue().publish(topic, {"k": f"{prefix}{number}"}))


def hold(topic: str) -> None:
    task = Queue().consume(topic)
    print(task.msgid, json.dumps(task.result()))


OTHERS = {"publish-many": publish, "hold": hold, "commit": commit}


def run(arguments: list) -> int:
    if arguments[0] in OTHERS:
        OTHERS[arguments[0]](*arguments[1:])
        return 0
    sys.argv = ["rfq", *arguments]
    try:
        main()
    except SystemExit as leaving:
        return leaving.code or 0
    return 0


if sys.argv[1] == "commands":
    for line in sys.stdin:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            status = run(json.loads(line))
        print(json.dumps([status, output.getvalue()]), flush=True)
else:
    queue = Queue()
    while True:
        task = queue.consume(sys.argv[2])
        print(task.result()["k"], flush=True)
        time.sleep(0.005)
        task.done()
