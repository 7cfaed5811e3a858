"""An asyncio worker framework whose queue is a directory by default, and a Redis when you outgrow the machine.

Tasks         an app: `@tasks.task` registers a function, `@tasks.raw_handler` one for messages of other programs
Task          a registered function: `await task.enqueue(...)`, `task.enqueue_sync(...)`, `task.using(delay=...)`
Context       what a handler can know about its own attempt: annotate the first parameter of the handler with it
Retry         raise it in a handler to run the message again later
Fail          raise it in a handler to keep the message as failed
Backoff       the delays of a task's retries
Schedule      a call and its times, for `tasks.schedules.sync`
Job           an enqueued call: its id and its queue
Call          a call that is not enqueued yet, for `tasks.enqueue_many`
Message       one unit of work in a queue
Draft         a message to be published
State         where a stored message is
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
from qworker.context import Context
from qworker.decision import Fail, Retry
from qworker.errors import LeaseLost, QworkerError
from qworker.message import Draft, Message, State
from qworker.retry import Backoff
from qworker.schedules.schedule import Schedule
from qworker.task import Call, Job, Task

__all__ = [
    "Backoff",
    "Call",
    "Context",
    "Draft",
    "Fail",
    "Job",
    "LeaseLost",
    "Message",
    "QworkerError",
    "Retry",
    "Schedule",
    "State",
    "Task",
    "Tasks",
]

__version__ = "0.1.0"
