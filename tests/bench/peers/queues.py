"""Other file and SQLite queues, each at its documented best: `queues.py PEER FOLDER DEPTH COUNT SECONDS`.

Runs in an environment of the peers' own, fsq's part under Python 2.7 too; prints microseconds per publish and per take
+ ack, with DEPTH messages waiting. Each half stops after COUNT messages or SECONDS.
"""

from __future__ import print_function

import json
import os
import sys
import time

BODY = b"x" * 100


class SqliteHuey(object):
    """huey's SQLite storage as its consumer uses it; a message is gone once it is taken: there is no ack."""

    def __init__(self, folder):
        from huey import SqliteHuey as Huey

        self.storage = Huey("bench", filename=os.path.join(folder, "huey.db")).storage

    def publish(self):
        self.storage.enqueue(BODY)

    def take(self):
        assert self.storage.dequeue() is not None

    def ack(self, taken):
        pass


class PersistQueue(object):
    """persist-queue's SQLiteAckQueue."""

    def __init__(self, folder):
        from persistqueue import SQLiteAckQueue

        self.queue = SQLiteAckQueue(folder, multithreading=True)

    def publish(self):
        self.queue.put(BODY)

    def take(self):
        return self.queue.get(block=False)

    def ack(self, taken):
        self.queue.ack(taken)


class LiteQueue(object):
    """litequeue; commits are not synced (WAL, NORMAL)."""

    def __init__(self, folder):
        from litequeue import LiteQueue as Queue

        self.queue = Queue(os.path.join(folder, "lite.db"))

    def publish(self):
        self.queue.put("x" * 100)

    def take(self):
        return self.queue.pop()

    def ack(self, taken):
        self.queue.done(taken.message_id)


class DirQ(object):
    """dirq's QueueSimple, listed once; nothing is synced."""

    def __init__(self, folder):
        from dirq.QueueSimple import QueueSimple

        self.queue = QueueSimple(os.path.join(folder, "dirq"))
        self.names = iter(())

    def publish(self):
        self.queue.add(BODY)

    def take(self):
        for fresh in (False, True):
            if fresh:
                self.names = iter(self.queue)
            for name in self.names:
                if self.queue.lock(name):
                    assert self.queue.get(name)
                    return name
        raise SystemExit("dirq: nothing left")

    def ack(self, taken):
        self.queue.remove(taken)


class Vsqs(object):
    """vsqs; the files' data are synced, the directory is not."""

    def __init__(self, folder):
        from vsqs.queue import QueueManager

        self.folder = os.path.join(folder, "bench")
        self.queue = QueueManager(folder).get_queue("bench")

    def fill(self, count):
        # Its own way costs a listing for each.
        first = int(time.time() * 1000000) - count - 1000000
        for number in range(first, first + count):
            with open(os.path.join(self.folder, str(number)), "wb") as file:
                file.write(BODY)

    def publish(self):
        self.queue.publish(BODY)

    def take(self):
        return self.queue.receive(visibility_timeout=30, timeout=1)

    def ack(self, taken):
        self.queue.delete(taken[0])


class Fsq(object):
    """fsq 0.2.5, one scan for all; the files' data are synced, the directory is not."""

    def __init__(self, folder):
        os.environ["FSQ_ROOT"] = folder
        import fsq

        self.fsq = fsq
        fsq.set_const("FSQ_ROOT", folder)
        fsq.install("bench")
        self.items = iter(())

    def publish(self):
        self.fsq.senqueue("bench", BODY, "a")

    def take(self):
        for fresh in (False, True):
            if fresh:
                self.items = self.fsq.scan("bench")
            for item in self.items:
                assert item.item.read()
                return item
        raise SystemExit("fsq: nothing left")

    def ack(self, taken):
        self.fsq.success(taken)


PEERS = {
    "SqliteHuey": SqliteHuey,
    "persist-queue SQLiteAckQueue": PersistQueue,
    "litequeue": LiteQueue,
    "dirq": DirQ,
    "vsqs": Vsqs,
    "fsq": Fsq,
}


def timed(step, count, seconds):
    clock = getattr(time, "perf_counter", time.time)
    began = clock()
    done = 0
    while done < count and clock() - began < seconds:
        step()
        done += 1
    return (clock() - began) / done * 1e6


def main():
    peer, folder = sys.argv[1:3]
    depth, count, seconds = (int(value) for value in sys.argv[3:])
    queue = PEERS[peer](folder)
    if hasattr(queue, "fill"):
        queue.fill(depth)
    else:
        for _ in range(depth):
            queue.publish()

    def take_and_ack():
        queue.ack(queue.take())

    # The first ones list, compile and cache.
    timed(queue.publish, 20, seconds)
    timed(take_and_ack, 20, seconds)
    publish = timed(queue.publish, count, seconds)
    take = timed(take_and_ack, count, seconds)
    print(json.dumps({"publish_us": publish, "take_us": take}))
    sys.stdout.flush()
    # Watcher threads of a peer must not keep the process.
    os._exit(0)


main()
