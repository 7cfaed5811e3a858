"""The minimal settings of Django."""

from __future__ import annotations

import os
from pathlib import Path

SECRET_KEY = os.environ.get("SECRET_KEY", "only-for-this-example")
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["shop", "qworker.django"]
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path(__file__).parents[1] / "shop.sqlite3",
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
