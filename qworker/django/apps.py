"""qworker as an app of a Django site, for its command."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["QworkerConfig"]


class QworkerConfig(AppConfig):
    """The entry of `qworker.django` in `INSTALLED_APPS`."""

    name = "qworker.django"
    label = "qworker"
