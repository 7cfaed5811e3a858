"""The background tasks of the shop. Plain functions run in threads, where Django's ORM can block."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path

from qworker import Context, Fail, Retry, Tasks
from qworker.django import FreshConnections

tasks = Tasks("file://./spool", hooks=[FreshConnections()])


@tasks.task
def confirm(order_id: int) -> None:
    """Confirm an order."""
    from shop.models import Order

    if not Order.objects.filter(pk=order_id).update(confirmed=True):
        raise Fail(f"there is no order {order_id}")


@tasks.every(timedelta(minutes=1), overlap="skip")
@tasks.task
def confirm_forgotten() -> None:
    """Enqueue the confirmations that are missing, because a process died between the commit and `enqueue`."""
    from shop.models import Order

    for order_id in Order.objects.filter(confirmed=False).values_list("pk", flat=True):
        confirm.using(id=f"order-{order_id}").enqueue_sync(order_id)


@tasks.task(result=timedelta(hours=1))
def export(ctx: Context) -> dict[str, object]:
    """Write all orders to a CSV file."""
    from shop.models import Order

    path = Path("exports") / f"{ctx.message.id}.csv"
    path.parent.mkdir(exist_ok=True)
    orders = Order.objects.order_by("pk")
    total = orders.count()
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        for number, order in enumerate(orders.iterator(), 1):
            if ctx.cancelled():
                raise Retry(f"stopped at order {number}")
            rows.writerow([order.pk, order.item, order.confirmed])
            ctx.progress(number, total)
    return {"orders": total, "file": str(path)}
