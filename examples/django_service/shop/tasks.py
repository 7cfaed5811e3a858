"""The background tasks of the shop."""

from __future__ import annotations

from django.db import close_old_connections

from qworker import Fail, Tasks

tasks = Tasks("file://./spool")


@tasks.task
def confirm(order_id: int) -> None:
    """Confirm an order. A plain function runs in a thread, where Django's ORM can block."""
    from shop.models import Order

    # Django does this at the end of a request. Without it, a broken connection would fail the next message too.
    close_old_connections()
    try:
        if not Order.objects.filter(pk=order_id).update(confirmed=True):
            raise Fail(f"there is no order {order_id}")
    finally:
        close_old_connections()
