"""fsq 0.2.5, under Python 2.7 or 3: `fsq_peer.py enqueue|drain ROOT COUNT`; prints microseconds an item."""

import os
import sys
import time

QUEUE = "bench"
BODY = b"x" * 100


def enqueue(fsq, count):
    for _ in range(count):
        fsq.senqueue(QUEUE, BODY)


def drain(fsq, count):
    items = fsq.scan(QUEUE)
    for _ in range(count):
        item = next(items)
        assert item.item.read()
        fsq.success(item)


def main():
    what, root, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ["FSQ_ROOT"] = root
    import fsq

    if what == "enqueue":
        fsq.install(QUEUE)
    step = {"enqueue": enqueue, "drain": drain}[what]
    began = time.time()
    step(fsq, count)
    sys.stdout.write("%f\n" % ((time.time() - began) / count * 1e6))


main()
