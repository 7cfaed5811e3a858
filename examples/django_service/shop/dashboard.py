"""A page of jobs and schedules: their states, progress, and buttons to cancel and to run."""

from __future__ import annotations

from itertools import islice

from django.http import HttpRequest, HttpResponse, HttpResponseNotFound
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from qworker.errors import InvalidName, UsageError
from shop.tasks import tasks

STATES = ("ready", "delayed", "leased", "done", "failed")


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """Show the jobs in one state or in all of them, and the schedules (GET /jobs?state=STATE)."""
    state = request.GET.get("state")
    jobs = tasks.jobs_sync(state=state if state in STATES else None)
    shown = {"states": STATES, "jobs": list(islice(jobs, 100)), "schedules": tasks.schedules.list_sync()}
    return render(request, "jobs.html", shown)


@require_POST
def cancel(request: HttpRequest, queue: str, job_id: str) -> HttpResponse:
    """Cancel a job, whether it waits or runs (POST /jobs/QUEUE/ID/cancel)."""
    try:
        tasks.job(job_id, queue).cancel_sync(by="dashboard")
    except InvalidName as error:
        return HttpResponseNotFound(str(error))
    return redirect("jobs")


@require_POST
def run(request: HttpRequest, name: str) -> HttpResponse:
    """Enqueue one call of a schedule now (POST /schedules/NAME/run)."""
    try:
        tasks.schedules.run_sync(name)
    except UsageError as error:
        return HttpResponseNotFound(str(error))
    return redirect("jobs")
