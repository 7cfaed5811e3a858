"""A tick per second with other task queues: `cron_queues.py PEER ROLE URL FOLDER NUMBER`.

Each enqueued tick is one line in FOLDER/ledger: the second in which it was due. arq gives it in the job's id; Celery
has nothing of the kind, so it is the second in which beat has sent the message.
"""

from __future__ import annotations

import os
import sys


def note(folder: str, second: int) -> None:
    """Write one line, whole."""
    ledger = os.open(os.path.join(folder, "ledger"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(ledger, b"%d\n" % second)
    os.close(ledger)


def arq(url: str, folder: str) -> None:
    """Run a worker with a cron job for each second."""
    from arq import cron
    from arq.connections import RedisSettings
    from arq.worker import Worker

    async def tick(ctx: dict[str, object]) -> None:
        # cron:tick:MILLISECONDS of the moment at which it is due.
        note(folder, round(int(str(ctx["job_id"]).rpartition(":")[2]) / 1000))

    jobs = [cron(tick, name="tick", second=set(range(60)), keep_result=0, microsecond=0)]
    Worker(cron_jobs=jobs, redis_settings=RedisSettings.from_dsn(url), poll_delay=0.1).run()


def celery(role: str, url: str, folder: str, number: str) -> None:
    """Run a worker, or one of two beats."""
    import time

    from celery import Celery, signals

    app = Celery("bench", broker=url)

    @app.task(name="tick", bind=True)
    def tick(self) -> None:
        note(folder, int(self.request.sent))

    @signals.before_task_publish.connect(weak=False)
    def sent(headers=None, **_: object) -> None:
        headers["sent"] = time.time()

    app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": 1.0}}
    app.conf.broker_connection_retry_on_startup = True
    if role == "worker":
        app.worker_main(["worker", "--pool", "solo", "--loglevel", "error", "--without-gossip", "--without-mingle"])
    else:
        app.Beat(schedule=os.path.join(folder, f"beat-{number}"), max_interval=0.2, loglevel="error").run()


if __name__ == "__main__":
    peer, role, url, folder, number = sys.argv[1:]
    if peer == "arq":
        arq(url, folder)
    else:
        celery(role, url, folder, number)
