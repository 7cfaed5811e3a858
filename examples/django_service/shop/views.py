"""Views that create orders and exports, and show them. Programs use them, so they need no CSRF token."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from qworker.django import enqueue_on_commit
from shop.models import Order
from shop.tasks import confirm, export


@csrf_exempt
@require_POST
def create(request: HttpRequest) -> HttpResponse:
    """Create an order, and enqueue its confirmation after the commit (POST /orders)."""
    item = request.POST.get("item", "")
    with transaction.atomic():
        order = Order.objects.create(item=item)
        # The call is enqueued after the commit, because before it a worker would not find the order. The id prevents a
        # second message while the first one is stored.
        enqueue_on_commit(confirm.using(id=f"order-{order.pk}"), order.pk)
        if not item:
            transaction.set_rollback(True)
            return JsonResponse({"error": "item is missing"}, status=400)
    return JsonResponse({"id": order.pk}, status=201)


@require_GET
def show(request: HttpRequest, number: int) -> HttpResponse:
    """Show an order (GET /orders/NUMBER)."""
    order = Order.objects.filter(pk=number).first()
    if order is None:
        return JsonResponse({"error": "no such order"}, status=404)
    return JsonResponse({"item": order.item, "confirmed": order.confirmed})


@csrf_exempt
@require_POST
def create_export(request: HttpRequest) -> HttpResponse:
    """Start an export of all orders (POST /exports)."""
    job = export.enqueue_sync()
    return JsonResponse({"id": job.id}, status=202, headers={"Location": f"/exports/{job.id}"})


@require_GET
def show_export(request: HttpRequest, job_id: str) -> HttpResponse:
    """Show the state of an export, and its result (GET /exports/ID)."""
    job = export.job(job_id)
    status = job.status_sync()
    if status.state == "gone":
        return JsonResponse({"error": "no such export"}, status=404)
    shown: dict[str, object] = {"state": status.state}
    if status.progress:
        shown |= {"done": status.progress.done, "total": status.progress.total}
    if status.state == "done":
        shown["result"] = job.result_sync(timeout=1)
    return JsonResponse(shown)
