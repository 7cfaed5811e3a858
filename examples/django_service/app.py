"""Set Django up, and import the tasks: `qworker run app:tasks` is the same as `manage.py runworker`."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from shop.tasks import tasks  # noqa: E402 - Django comes first

__all__ = ["tasks"]
