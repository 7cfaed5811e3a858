"""What the shop does in the background."""

from __future__ import annotations

from django.db import close_old_connections

from qworker import Fail, Tasks

tasks = Tasks("file://./spool")


@tasks.task
def confirm(order_id: int) -> None:
    """Confirm an order. A plain function runs in a thread, where Django's ORM may block."""
    from shop.models import Order

    # As a request does at its end: a connection that has died in the meantime must not fail the next message too.
    close_old_connections()
    try:
        if not Order.objects.filter(pk=order_id).update(confirmed=True):
            raise Fail(f"there is no order {order_id}")
    finally:
        close_old_connections()
