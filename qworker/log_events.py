"""The constant names of log events and of their fields.

Every event of a message has `message_id`, `task`, `queue`, `tries` and `token`. Every event of a worker has `worker`.
"""

from __future__ import annotations

__all__ = [
    "ARGUMENTS_REFUSED",
    "BACKEND_RECOVERED",
    "BACKEND_UNAVAILABLE",
    "CONCURRENCY_LIMITED",
    "DIRECTORY_MOVED_ASIDE",
    "DIRECTORY_REPLACED",
    "DURATION_S",
    "ERROR",
    "ERROR_TYPE",
    "FAILURE_NOT_REPORTED",
    "HANDLER_NOT_STARTED",
    "HANDLER_STUCK",
    "HINT",
    "HISTORY_PAUSED",
    "HISTORY_PRUNE_FAILED",
    "HISTORY_RESUMED",
    "ISOLATION_DISABLED",
    "ISOLATION_FAILED",
    "LEASE_LOST",
    "LOOP",
    "MESSAGES_LEFT",
    "MESSAGE_ACKED",
    "MESSAGE_BLOCKED",
    "MESSAGE_CANCELLED",
    "MESSAGE_FAILED",
    "MESSAGE_ID",
    "MESSAGE_ISOLATED",
    "MESSAGE_RELEASED",
    "MESSAGE_RETRIED",
    "MESSAGE_TOO_LARGE",
    "OBSERVER_FAILED",
    "OUTCOME",
    "PROGRESS_NOT_STORED",
    "PROVIDER",
    "PROVIDER_FAILED",
    "QUEUE",
    "QUEUE_UNUSABLE",
    "REMOVAL_FAILED",
    "RESULT_NOT_KEPT",
    "SCHEDULE_SUPERSEDED",
    "SCHEDULE_UNUSABLE",
    "SETTLEMENT_ABANDONED",
    "SETTLEMENT_DELAYED",
    "SPAN_ID",
    "TASK",
    "TICKS_MISSED",
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

# Level debug. The handler returned.
MESSAGE_ACKED = "message_acked"
# Level warning. The message runs again later.
MESSAGE_RETRIED = "message_retried"
# Level error. The message has failed and is kept.
MESSAGE_FAILED = "message_failed"
# Level info. The message was released without counting a try.
MESSAGE_RELEASED = "message_released"
# Level info. The message is a suspect: its last attempt killed its process. Its handler runs in another process.
MESSAGE_ISOLATED = "message_isolated"
# Level warning. The process of a suspect could not import the app, or enter its lifespan. The message is released.
ISOLATION_FAILED = "isolation_failed"
# Level warning. No thread or process can be started for the handler. The message is released.
HANDLER_NOT_STARTED = "handler_not_started"
# Level warning, once for each worker. Suspects run in the worker itself, because no other process can import the app.
ISOLATION_DISABLED = "isolation_disabled"
# Level error, once for each message and worker. The body is larger than `max_body` of the URL. The message stays.
MESSAGE_TOO_LARGE = "message_too_large"
# Level warning. Another worker may hold the message, and this worker's outcome does not count.
LEASE_LOST = "lease_lost"
# Level info. The message was cancelled while this worker held it. Its handler was stopped.
MESSAGE_CANCELLED = "message_cancelled"
# Level warning, once for each message. The store cannot store this message's outcome, but it stores others. The
# settlement is retried with growing pauses until the lease expires.
SETTLEMENT_DELAYED = "settlement_delayed"
# Level error. The store did not answer before the lease expired.
SETTLEMENT_ABANDONED = "settlement_abandoned"
# Level warning. A cancelled handler does not stop. Its lease will expire.
HANDLER_STUCK = "handler_stuck"
# Level warning. The handler returned a value that JSON cannot hold. The message is acked.
RESULT_NOT_KEPT = "result_not_kept"
# Level debug. The store did not take the progress of handlers.
PROGRESS_NOT_STORED = "progress_not_stored"
# Level error. The call of `on_failure` can never be stored. The message fails without it.
FAILURE_NOT_REPORTED = "failure_not_reported"
# Level warning, once for each name. The app has no task and no raw handler for the message, which is released.
UNKNOWN_TASK = "unknown_task"
# Level warning, once for each task. The arguments of a call do not fit the signature. The message is released.
ARGUMENTS_REFUSED = "arguments_refused"

# -- a worker's life ---------------------------------------------------------------------------------------------------

WORKER_STARTED = "worker_started"
WORKER_QUIET = "worker_quiet"
WORKER_DRAINING = "worker_draining"
WORKER_ABORTING = "worker_aborting"
WORKER_STOPPED = "worker_stopped"
# Level warning, once. This process holds the maximum number of leases that the store allows.
CONCURRENCY_LIMITED = "concurrency_limited"
BACKEND_UNAVAILABLE = "backend_unavailable"
BACKEND_RECOVERED = "backend_recovered"
OBSERVER_FAILED = "observer_failed"
# Level error. A provider with the scope `worker` raised an error while it was closed. Field: provider.
PROVIDER_FAILED = "provider_failed"
# Level warning. One queue cannot be used, and the others can. Fields: queue, error.
QUEUE_UNUSABLE = "queue_unusable"

# Level warning. The directory of a store or of a queue was removed or replaced. The one with its path is used, which is
# created if it does not exist. Field: directory.
DIRECTORY_MOVED_ASIDE = "directory_moved_aside"
DIRECTORY_REPLACED = "directory_replaced"
MESSAGES_LEFT = "messages_left"
REMOVAL_FAILED = "removal_failed"
# Level error, once for each file. A file of a directory queue cannot be leased, because it cannot be opened, read or
# moved. The worker tries it again after growing pauses. Fields: queue, file, reason.
MESSAGE_BLOCKED = "message_blocked"

# -- schedules ---------------------------------------------------------------------------------------------------------

# Level warning, once for each schedule. A newer `qworker run` has another definition for the name, and this worker
# ticks by that one. Fields: schedule, definition, ticks_by.
SCHEDULE_SUPERSEDED = "schedule_superseded"
# Level error, once for each schedule. It does not tick here, for example because its time zone is not known here.
# Fields: schedule, error.
SCHEDULE_UNUSABLE = "schedule_unusable"
# Level info. Ticks of a schedule were missed or skipped and are not enqueued. Fields: schedule, missed, enqueued.
TICKS_MISSED = "ticks_missed"

# -- the history -------------------------------------------------------------------------------------------------------

# Level warning, once. Events cannot be written (full disk, no permission). Messages still run, and the worker retries.
HISTORY_PAUSED = "history_paused"
# Level warning. Events can be written again. The events since `history_paused` are missing.
HISTORY_RESUMED = "history_resumed"
# Level warning. Events that are older than the retention cannot be removed.
HISTORY_PRUNE_FAILED = "history_prune_failed"

# -- fields ------------------------------------------------------------------------------------------------------------

MESSAGE_ID = "message_id"
TASK = "task"
QUEUE = "queue"
TRIES = "tries"
TOKEN = "token"
WORKER = "worker"
# Seconds that the handler ran.
DURATION_S = "duration_s"
OUTCOME = "outcome"
ERROR_TYPE = "error_type"
ERROR = "error"
# What to do.
HINT = "hint"
# These two are present only if there is a span.
TRACE_ID = "trace_id"
SPAN_ID = "span_id"
# The function of a provider.
PROVIDER = "provider"
# The loop of the worker that logs.
LOOP = "loop"
