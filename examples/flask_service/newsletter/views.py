"""The pages of the site. Views have no event loop, so they use the methods with `_sync`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

from flask import Blueprint, Response, abort, redirect, render_template, request, url_for
from werkzeug.wrappers import Response as Redirect

from newsletter.tasks import Report, send, tasks
from qworker import Job, Status
from qworker.errors import BackendError, InvalidName, MessageTooLarge

pages = Blueprint("pages", __name__)


@pages.get("/")
def index() -> str:
    """Show the form, and the newsletters that wait or run or have failed."""
    return render_template("index.html", jobs=islice(tasks.jobs_sync(task=send), 100))


@pages.post("/newsletters")
def create() -> Redirect:
    """Enqueue a newsletter. The call is stored durably before the answer."""
    subject = " ".join(request.form["subject"].split())
    recipients = request.form["recipients"].split()
    if not recipients or not all("@" in recipient for recipient in recipients):
        abort(400, "the recipients must be addresses, one on each line")
    job = send.enqueue_sync(subject, request.form["text"], recipients)
    return redirect(url_for(".show", job_id=job.id), 303)


@pages.get("/newsletters/<job_id>")
def show(job_id: str) -> str:
    """Show the progress of a newsletter, or its report."""
    job, status = find(job_id)
    report: Report | None = job.result_sync(timeout=1) if status.state == "done" else None
    return render_template("newsletter.html", status=status, report=report)


@pages.get("/newsletters/<job_id>/events")
def events(job_id: str) -> Response:
    """Send each new progress to the page (server-sent events), and `end` when the job has ended."""
    job, _ = find(job_id)

    def stream() -> Iterator[str]:
        for progress in job.progress_sync():
            yield f"data: {json.dumps({'done': progress.done, 'total': progress.total, 'text': progress.text})}\n\n"
        yield "event: end\ndata:\n\n"

    return Response(stream(), mimetype="text/event-stream")


@pages.post("/newsletters/<job_id>/cancel")
def cancel(job_id: str) -> Redirect:
    """Cancel a newsletter, whether it waits or runs. Mails that are sent stay sent."""
    job, _ = find(job_id)
    job.cancel_sync(by="the editor")
    return redirect(url_for(".show", job_id=job_id), 303)


def find(job_id: str) -> tuple[Job[Report], Status]:
    """Return the job of an address, and its status."""
    job = send.job(job_id)
    status = job.status_sync()
    if status.state == "gone":
        abort(404, "there is no such newsletter, or its report has expired")
    return job, status


@pages.app_errorhandler(BackendError)
def unavailable(error: BackendError) -> tuple[str, int]:
    """Answer 503 if the queue cannot be used, so that the user tries again later."""
    return str(error), 503


@pages.app_errorhandler(InvalidName)
def unknown(error: InvalidName) -> tuple[str, int]:
    """Answer 404 if the id in an address cannot be the id of a job."""
    return str(error), 404


@pages.app_errorhandler(MessageTooLarge)
def too_large(error: MessageTooLarge) -> tuple[str, int]:
    """Answer 413 if the newsletter does not fit into one message."""
    return str(error), 413
