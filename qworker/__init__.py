"""qworker: an asyncio worker framework whose queue is a directory by default, and a Redis when you outgrow the machine."""

from __future__ import annotations

from qworker.app import Tasks
from qworker.context import Context
from qworker.errors import Fail, LeaseLost, QworkerError, Retry
from qworker.message import Draft, Message, State
from qworker.retry import Backoff
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
    "State",
    "Task",
    "Tasks",
]

__version__ = "0.1.0"
