"""The settings of the site, in views and in handlers."""

from __future__ import annotations

from typing import cast

from flask import current_app

__all__ = ["setting"]


def setting(name: str) -> str:
    """Return a setting of the site as text."""
    return str(cast("object", current_app.config[name]))
