"""Set Django up, and import the tasks: with it `qworker run app:tasks` works as `manage.py qworker run app:tasks`."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from shop.tasks import tasks  # noqa: E402 - Django comes first

__all__ = ["tasks"]
