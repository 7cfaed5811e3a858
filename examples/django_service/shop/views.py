"""Ordering, and looking at an order."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_GET, require_POST

from shop.models import Order
from shop.tasks import confirm


@require_POST
def create(request: HttpRequest) -> HttpResponse:
    """POST /orders: the order and, once it is committed, its confirmation."""
    item = request.POST.get("item", "")
    with transaction.atomic():
        order = Order.objects.create(item=item)
        # After the commit: a worker must not look for an order that is not there yet, or never will be. The id prevents a
        # second message while the first one is stored.
        transaction.on_commit(lambda: confirm.using(id=f"order-{order.pk}").enqueue_sync(order.pk))
        if not item:
            transaction.set_rollback(True)
            return JsonResponse({"error": "item is missing"}, status=400)
    return JsonResponse({"id": order.pk}, status=201)


@require_GET
def show(request: HttpRequest, number: int) -> HttpResponse:
    """GET /orders/NUMBER."""
    order = Order.objects.filter(pk=number).first()
    if order is None:
        return JsonResponse({"error": "no such order"}, status=404)
    return JsonResponse({"item": order.item, "confirmed": order.confirmed})
