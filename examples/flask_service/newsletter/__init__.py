"""A site that sends newsletters. Flask and the worker call its factory, `create_app`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask import Flask

from newsletter.tasks import app_context, tasks
from newsletter.views import pages


def create_app(settings: Mapping[str, Any] | None = None) -> Flask:
    """Make the site, and give its tasks their queue. `NEWSLETTER_<SETTING>` in the environment replaces a default."""
    app = Flask(__name__)
    app.config.from_mapping(
        QUEUE_URL="file://./spool", MAIL_DIRECTORY="mail", MAILS_PER_SECOND=10, EDITOR="editor@example.org"
    )
    app.config.from_prefixed_env("NEWSLETTER")
    app.config.from_mapping(settings)
    tasks.url = app.config["QUEUE_URL"]
    app_context.app = app
    app.register_blueprint(pages)
    return app
