"""The examples of web services, run as their READMEs say."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from email import message_from_bytes
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest

from tests.support.processes import Process, environment, started
from tests.support.waiting import PATIENCE, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    copy = tmp_path / request.param
    shutil.copytree(EXAMPLES / request.param, copy, ignore=shutil.ignore_patterns("__pycache__", "spool", "*.sqlite3"))
    return copy


class Answer(NamedTuple):
    status: int
    location: str
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Site:
    """A running service, as its users meet it."""

    def __init__(self, process: Process) -> None:
        line = process.line(lambda text: "unning on http" in text)
        self.address = urlsplit("http" + line.split("unning on http")[1].split()[0]).netloc

    def ask(self, method: str, path: str, *, json_body: object = None, form: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE)
        body, headers = None, {}
        if form is not None:
            body, headers = urlencode(form), {"Content-Type": "application/x-www-form-urlencoded"}
        elif json_body is not None:
            body, headers = json.dumps(json_body), {"Content-Type": "application/json"}
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.headers.get("Location", ""), response.read().decode())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)


def stored(queue: Path, *states: str) -> list[str]:
    return [path.name for state in states for path in (queue / state).glob("*")]


@pytest.mark.parametrize("folder", ["fastapi_service"], indirect=True)
def test_a_fastapi_service_starts_shows_and_cancels_jobs_and_drains(folder: Path) -> None:
    with started(folder, "app:app", "--port", "0", program=("-m", "uvicorn")) as process:
        site = Site(process)

        def create(samples: int) -> str:
            answer = site.ask("POST", "/estimates", json_body={"samples": samples})
            assert (answer.status, answer.location) == (202, f"/estimates/{answer.json['id']}")
            return answer.location

        endless = create(1_000_000_000)
        wait_for(lambda: site.get(endless).json["done"] > 0, "progress", lambda: process.text)
        jobs = {create(samples): samples for samples in range(20_001, 20_011)}
        for job, samples in jobs.items():
            result = site.get(f"{job}/result?wait=30").json
            assert result["samples"] == samples
            assert 2.8 < result["pi"] < 3.5
            # A job has its result before it is done.
            done = {"state": "done", "code": None, "done": samples, "total": samples}
            wait_for(lambda job=job, done=done: site.get(job).json == done, "its end", lambda: process.text)

        assert site.get(endless).json["state"] == "leased"
        assert site.get(f"{endless}/result").status == 409
        assert site.ask("DELETE", endless).json == {"was": "running"}
        assert site.get(endless).json["code"] == "cancelled"
        assert site.get(f"{endless}/result").status == 410
        assert site.ask("DELETE", endless).json == {"was": "finished"}

        assert site.ask("POST", "/estimates", json_body={"samples": 0}).status == 422
        for path in ("/estimates/unknown", "/estimates/unknown/result", "/estimates/no%20id"):
            assert site.get(path).status == 404
        # The schedule ticks every 2 s. Jobs that are done are not stored any more.
        wait_for(lambda: site.get("/statistics").json == {"failed": 1}, "a tick", lambda: process.text)
        assert site.get("/livez") == (200, "", '{"worker":"working"}')
        process.signal(signal.SIGTERM)
        # uvicorn ends by the signal that it was told to end by.
        assert process.end() in {0, -signal.SIGTERM}, process.text
        assert "Application shutdown complete" in process.text
    assert not stored(folder / "spool/default", "queue", "lease", "delay")


@pytest.mark.parametrize("folder", ["flask_service"], indirect=True)
def test_a_flask_site_sends_each_mail_once_although_its_worker_is_killed(folder: Path) -> None:
    mail = folder / "mail"
    recipients = [f"reader{number}@example.org" for number in range(300)]

    def sent() -> dict[str, int]:
        """The mails in the directory, each with what a second write would change."""
        return {path.name: path.stat().st_ino for path in mail.glob("*.eml")}

    def enqueue(site: Site, subject: str, to: str) -> Answer:
        return site.ask("POST", "/newsletters", form={"subject": subject, "text": "Hello", "recipients": to})

    worker = ("run", "newsletter.worker:tasks", "--log-format", "json")
    # So slow that there is time to kill it before its last mail, and so fast that the test is short.
    slow, fast = {"NEWSLETTER_MAILS_PER_SECOND": "10"}, {"NEWSLETTER_MAILS_PER_SECOND": "200"}
    with started(folder, "--app", "newsletter", "run", "--port", "0", program=("-m", "flask")) as process:
        site = Site(process)
        answer = enqueue(site, "News", "\n".join(recipients))
        assert answer.status == 303
        page = answer.location
        assert "State: <b>ready</b>" in site.get(page).text
        unwanted = enqueue(site, "Oops", "a@example.org b@example.org").location
        assert site.ask("POST", f"{unwanted}/cancel").location == unwanted
        assert "cancelled by the editor" in site.get(unwanted).text
        assert "News</a>: ready" in site.get("/").text
        assert enqueue(site, "News", "not an address").status == 400
        assert site.get("/newsletters/unknown").status == 404

        with started(folder, *worker, env=slow) as killed:
            wait_for(lambda: len(sent()) > 20, "mails", lambda: killed.text)
            killed.popen.kill()
        before = sent()
        assert 20 < len(before) < len(recipients)
        assert "<progress" in site.get(page).text

        with started(folder, *worker, env=fast) as second:
            *progress, end = site.get(f"{page}/events").text.removesuffix("\n\n").split("\n\n")
            assert end == "event: end\ndata:"
            done = [json.loads(event.removeprefix("data: "))["done"] for event in progress]
            # The first one can be the last one of the killed worker.
            assert done[1:] == sorted(set(done[1:]))
            assert done[-1] == len(recipients)
            assert f"{len(recipients)} mails were sent." in site.get(page).text
            after = sent()
            assert before.items() <= after.items(), "a mail was sent twice"
            mails = [message_from_bytes((mail / name).read_bytes()) for name in after]
            assert sorted(one["To"] for one in mails) == sorted(recipients)

            # The digest on weekdays at 7, now.
            with started(folder, "schedules", "file://./spool", "run", "digest") as command:
                assert command.end() == 0, command.text
            (digest,) = wait_for(lambda: list(mail.glob("digest-*.eml")), "the digest", lambda: second.text)
            text = message_from_bytes(digest.read_bytes()).get_payload()
            assert f"{len(recipients)} mails were sent" in text
            assert "Oops: cancelled by the editor" in text
            assert second.drain() == 0, second.text


# Requests without a server: the views, their transactions and their signals are the real ones.
BEFORE_THE_WORKER = """
import app, json, re
from django.core.management import call_command
from django.template.loader import render_to_string
from django.test import Client
from qworker import Progress, Status
from shop.models import Order

call_command("migrate", run_syncdb=True, verbosity=0)
client = Client(SERVER_NAME="localhost", enforce_csrf_checks=True)
created = client.post("/orders", {"item": "tea"})
assert created.status_code == 201, created.content
assert client.post("/orders", {"item": ""}).status_code == 400
assert client.get("/orders/1").json() == {"item": "tea", "confirmed": False}
# As a process leaves it that dies between the commit and `enqueue`.
Order.objects.create(item="forgotten")

wanted, unwanted = (client.post("/exports").headers["Location"] for _ in range(2))
assert client.get(wanted).json() == {"state": "ready"}
page = client.get("/jobs").content.decode()
# A handler need not know the total of its progress.
counting = Status(id="count", queue="default", progress=Progress(done=7, total=None))
shown = render_to_string("jobs.html", {"jobs": [counting]})
assert "<td>7</td>" in shown and "<progress" not in shown, shown
token = {"csrfmiddlewaretoken": re.search('csrfmiddlewaretoken" value="([^"]+)"', page)[1]}
assert re.findall("<td>(.*?)</td>\\\\s*<td>order-1</td>\\\\s*<td>(.*?) *</td>", page) == [("confirm(1,)", "ready")]
(button,) = [action for action in re.findall('action="([^"]+)"', page) if unwanted.rpartition("/")[2] in action]
assert client.post(button).status_code == 403
assert client.post(button, token).status_code == 302
assert client.post("/schedules/confirm_forgotten/run", token).status_code == 302
assert client.post("/schedules/other/run", token).status_code == 404
for job, status in {"no queue/x": 404, ".%00/x": 404, "default/unknown": 302}.items():
    assert client.post(f"/jobs/{job}/cancel", token).status_code == status, job
# A task of an app that only `manage.py qworker` imports.
app.tasks.named("note").enqueue_sync()
print(json.dumps([wanted, unwanted]))
"""
NOTES = """
from pathlib import Path
from shop.tasks import tasks

@tasks.task
def note() -> None:
    Path("note").touch()
"""
AFTER_THE_WORKER = """
import app, sys
from pathlib import Path
from django.core.management import CommandError, call_command
from django.test import Client

assert Path("note").exists()
call_command("qworker", "stats", "file://./spool")
try:
    call_command("qworker", "run", "shop.tasks:tasks", "--brust")
except CommandError as error:
    assert error.returncode == 2
else:
    raise AssertionError("its exit status is lost")
client = Client(SERVER_NAME="localhost")
wanted, unwanted = sys.argv[1:]
for number in (1, 2):
    assert client.get(f"/orders/{number}").json()["confirmed"]
export = client.get(wanted).json()
assert (export["state"], export["done"], export["total"], export["result"]["orders"]) == ("done", 2, 2, 2), export
assert len(Path(export["result"]["file"]).read_text().splitlines()) == 2
assert client.get(unwanted).json()["state"] == "failed"
page = client.get("/jobs?state=failed").content.decode()
assert "cancelled by dashboard" in page
assert "order-1" not in client.get("/jobs").content.decode()
assert "<td>confirm_forgotten</td>" in page
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("folder", ["django_service"], indirect=True)
def test_a_django_shop_enqueues_what_is_committed_and_its_dashboard_shows_and_cancels_jobs(folder: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    notes = folder / "notes"
    notes.mkdir()
    (notes / "__init__.py").touch()
    (notes / "tasks.py").write_text(NOTES)
    with (folder / "shop/settings.py").open("a") as settings:
        settings.write('INSTALLED_APPS += ["notes"]\n')
    wanted, unwanted = json.loads(run("-c", BEFORE_THE_WORKER))
    # One order, one export, one call of the schedule and a note: the order that was rolled back has left nothing.
    assert len(stored(folder / "spool/default", "queue")) == 4
    # It has killed a worker, so it runs in a process that manage.py has not started.
    (note,) = (folder / "spool/default/queue").glob("*_0_note")
    note.rename(folder / "spool/default/delay" / f"1{'0' * 12}.{note.name.replace('_0_', '_01_')}")
    run("manage.py", "qworker", "run", "shop.tasks:tasks", "--burst")
    run("-c", AFTER_THE_WORKER, wanted, unwanted)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("folder", ["django_service"], indirect=True)
def test_the_management_command_runs_workers_that_drain(folder: Path) -> None:
    with started(
        folder, "qworker", "run", "--settings", "shop.settings", "shop.tasks:tasks", "-w", "2", program=("manage.py",)
    ) as process:
        process.event("worker_started", 2)
        assert process.drain() == 0, process.text
