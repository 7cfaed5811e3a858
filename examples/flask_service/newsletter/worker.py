"""What `qworker run newsletter.worker:tasks` imports: the tasks, with the settings of the site."""

from __future__ import annotations

from newsletter import create_app
from newsletter.tasks import tasks

__all__ = ["tasks"]

create_app()
