"""The names of log events and of their fields: constant, so that they can be searched and counted.

Every event of a message has `message_id`, `task`, `queue`, `tries` and `token`; every event of a worker has `worker`.
"""

from __future__ import annotations

__all__ = [
    "BACKEND_RECOVERED",
    "BACKEND_UNAVAILABLE",
    "CONCURRENCY_LIMITED",
    "DURATION_S",
    "ERROR",
    "ERROR_TYPE",
    "HANDLER_STUCK",
    "HISTORY_PAUSED",
    "HISTORY_PRUNE_FAILED",
    "HISTORY_RESUMED",
    "LEASE_LOST",
    "LOOP",
    "MESSAGE_ACKED",
    "MESSAGE_FAILED",
    "MESSAGE_ID",
    "MESSAGE_ISOLATED",
    "MESSAGE_RELEASED",
    "MESSAGE_RETRIED",
    "OBSERVER_FAILED",
    "OUTCOME",
    "QUEUE",
    "SETTLEMENT_ABANDONED",
    "SPAN_ID",
    "TASK",
    "TOKEN",
    "TRACE_ID",
    "TRIES",
    "UNKNOWN_TASK",
    "WORKER",
    "WORKER_ABORTING",
    "WORKER_DRAINING",
    "WORKER_QUIET",
    "WORKER_STARTED",
    "WORKER_STOPPED",
]

# -- a message's end ---------------------------------------------------------------------------------------------------

# debug: the handler returned.
MESSAGE_ACKED = "message_acked"
# warning: it runs again later.
MESSAGE_RETRIED = "message_retried"
# warning: it has failed and is kept.
MESSAGE_FAILED = "message_failed"
# info: given back untouched.
MESSAGE_RELEASED = "message_released"
# info: its last attempt waits until nothing else runs in this worker.
MESSAGE_ISOLATED = "message_isolated"
# warning: another may have it; this worker's outcome does not count.
LEASE_LOST = "lease_lost"
# error: the store did not answer until the lease had expired.
SETTLEMENT_ABANDONED = "settlement_abandoned"
# warning: a cancelled handler does not end; its lease is left to expire.
HANDLER_STUCK = "handler_stuck"
# warning, once per name: neither a task nor a raw handler takes it.
UNKNOWN_TASK = "unknown_task"

# -- a worker's life ---------------------------------------------------------------------------------------------------

WORKER_STARTED = "worker_started"
WORKER_QUIET = "worker_quiet"
WORKER_DRAINING = "worker_draining"
WORKER_ABORTING = "worker_aborting"
WORKER_STOPPED = "worker_stopped"
# warning, once: this process holds as many leases as the store lets it.
CONCURRENCY_LIMITED = "concurrency_limited"
BACKEND_UNAVAILABLE = "backend_unavailable"
BACKEND_RECOVERED = "backend_recovered"
OBSERVER_FAILED = "observer_failed"

# -- the history -------------------------------------------------------------------------------------------------------

# warning, once: events cannot be written (a full disk, no permission); messages flow on, and it is tried again.
HISTORY_PAUSED = "history_paused"
# warning: they can again; what happened meanwhile is not in the history.
HISTORY_RESUMED = "history_resumed"
# warning: what is older than the retention cannot be removed.
HISTORY_PRUNE_FAILED = "history_prune_failed"

# -- fields ------------------------------------------------------------------------------------------------------------

MESSAGE_ID = "message_id"
TASK = "task"
QUEUE = "queue"
TRIES = "tries"
TOKEN = "token"
WORKER = "worker"
# Seconds from the handler's start to its end.
DURATION_S = "duration_s"
OUTCOME = "outcome"
ERROR_TYPE = "error_type"
ERROR = "error"
# Where there is a span.
TRACE_ID = "trace_id"
SPAN_ID = "span_id"
# Which of a worker's loops speaks.
LOOP = "loop"
