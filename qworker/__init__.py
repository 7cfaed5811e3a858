"""An asyncio worker framework whose queue is a directory by default, and a Redis when you outgrow the machine.

Tasks         an app: `@tasks.task` registers a function, `@tasks.raw_handler` one for messages of other programs
Task          a registered function: `await task.enqueue(...)`, `task.enqueue_sync(...)`, `task.using(delay=...)`
NamedTask     a task by its name: `tasks.named("mail.send")` enqueues calls without importing the function
Context       what a handler can know about its own attempt: annotate the first parameter of the handler with it
Retry         raise it in a handler to run the message again later
Fail          raise it in a handler to keep the message as failed
Backoff       the delays of a task's retries, which grow; `Delays(5, 10, 20)` are given ones
NoRetry       the policy of errors that no retry can fix: `retry={ValueError: NoRetry}`
RetryPolicy   what your own retry policy must have
Seconds       a span of time: a number of seconds, or a timedelta
Moment        a point in time: Unix seconds, or a datetime with a time zone
Schedule      a call and its times, for `tasks.schedules.sync`
Job           an enqueued call: `await job.result()`, `job.status()`, `job.progress()`, `job.cancel()`
Status        what is known about a job at one moment
Progress      what a handler has reported with `context.progress(...)`
Call          a call that is not enqueued yet, for `tasks.enqueue_many`
Buffered      a hook: calls of a handler are sent when it has returned
Hook          code around handlers: `Tasks(hooks=[...])`, `@tasks.task(hooks=[...])`
Attempt       one run of a handler, as its hooks see it
provide       the default of a parameter that the worker fills
FailedCall    what an `on_failure` task gets: a call that has failed permanently
Message       one unit of work in a queue
Draft         a message to be published
State         where a stored message is
CancelReason  why a handler is stopped: `ctx.reason`
Unique        the options of a unique key: at most one call with it waits or runs
LeaseLost     an error: the lease of the message is lost
QworkerError  the base class of all errors, which are in `qworker.errors`

A first app:

    from qworker import Tasks

    tasks = Tasks("file://./spool")

    @tasks.task
    async def greet(name: str) -> None:
        print(f"hello {name}")

    greet.enqueue_sync("world")      # then, in a shell: qworker run app:tasks
"""

from __future__ import annotations

from qworker.app import Tasks
from qworker.attempt.buffered import Buffered
from qworker.attempt.hooks import Attempt, Hook
from qworker.attempt.injection import provide
from qworker.call import Call
from qworker.context import CancelReason, Context
from qworker.decision import Fail, Retry
from qworker.duration import Moment, Seconds
from qworker.errors import LeaseLost, QworkerError
from qworker.failed_call import FailedCall
from qworker.jobs.job import Job
from qworker.jobs.records import Progress
from qworker.jobs.status import Status
from qworker.message import Draft, Message, State
from qworker.named_task import NamedTask
from qworker.retry import Backoff, Delays, NoRetry, RetryPolicy
from qworker.schedules.schedule import Schedule
from qworker.task import Task
from qworker.unique import Unique

__all__ = [
    "Attempt",
    "Backoff",
    "Buffered",
    "Call",
    "CancelReason",
    "Context",
    "Delays",
    "Draft",
    "Fail",
    "FailedCall",
    "Hook",
    "Job",
    "LeaseLost",
    "Message",
    "Moment",
    "NamedTask",
    "NoRetry",
    "Progress",
    "QworkerError",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "Seconds",
    "State",
    "Status",
    "Task",
    "Tasks",
    "Unique",
    "provide",
]

__version__ = "0.2.0"
