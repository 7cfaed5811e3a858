"""A Django site in a process of its own, as `manage.py qworker` has it."""
# Django has no type hints.
# pyright: basic

from __future__ import annotations

import django
from django.utils.module_loading import autodiscover_modules

__all__ = ["set_up"]


def set_up() -> None:
    """Set Django up, and import the modules `tasks` of the installed apps."""
    django.setup()
    autodiscover_modules("tasks")
