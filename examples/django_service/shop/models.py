"""The model of orders."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    item = models.CharField(max_length=100)
    confirmed = models.BooleanField(default=False)
