"""The vsqs 0.3 package at work; run with a Python that has it installed.

vsqs_peer.py ROOT QUEUE publish PREFIX COUNT
vsqs_peer.py ROOT QUEUE consume COUNT VISIBILITY    prints each body it got and deleted
vsqs_peer.py ROOT QUEUE hold VISIBILITY             prints one id and body, and keeps the lease
vsqs_peer.py ROOT QUEUE size
"""

import sys
import time

from vsqs.queue import QueueManager

root, name, what = sys.argv[1:4]
manager = QueueManager(root)
queue = manager.get_queue(name)
if what == "publish":
    for number in range(int(sys.argv[5])):
        print(queue.publish(f"{sys.argv[4]}{number}".encode()), flush=True)
elif what == "consume":
    for _ in range(int(sys.argv[4])):
        message_id, body = None, None
        deadline = time.time() + 30
        while message_id is None and time.time() < deadline:
            # The released receive() may sleep through a change that came before it began to wait: a short wait, again.
            message_id, body = queue.receive(visibility_timeout=int(sys.argv[5]), timeout=0.2)
        if message_id is None:
            break
        queue.delete(message_id)
        print(body.decode(), flush=True)
elif what == "hold":
    message_id, body = queue.receive(visibility_timeout=int(sys.argv[4]), timeout=10)
    print(message_id, body.decode(), flush=True)
elif what == "size":
    print(queue.size(), flush=True)
manager.close()
