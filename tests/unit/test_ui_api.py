"""The JSON API of the dashboard, its exports, and its description."""

from __future__ import annotations

import csv
import io
import json
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from qworker import Draft
from qworker.backend import Backend
from qworker.ui.access import Login, Secrets
from qworker.ui.api import ENDPOINTS
from qworker.ui.pages import PAGES
from qworker_memory import MemoryBackend
from tests.support.dashboards import ERROR, fill_store, watched

pytestmark = pytest.mark.usefixtures("patient_dashboards")

REFERENCE = Path(__file__).parents[2] / "docs/reference/dashboard-api.md"
# The pages that people only use to move to another one have no data of their own.
DATA = {
    "/": "/queues",
    "/q/{queue}": "/queues/{queue}",
    "/m/{queue}/{id}": "/queues/{queue}/messages/{id}",
    "/m/{queue}/{id}/body": "/queues/{queue}/messages/{id}/body",
}


@pytest_asyncio.fixture
async def backend() -> AsyncIterator[Backend]:
    opened = MemoryBackend(f"ui-{secrets.token_hex(4)}")
    await opened.open()
    await fill_store(opened)
    yield opened
    await opened.aclose()


def filled(path: str, group: str) -> str:
    given = {"queue": "mail", "id": "m-0", "key": group}
    return "/api/v1" + re.sub(r"{(\w+)}", lambda found: given[found[1]], path)


async def group_of(client: httpx.AsyncClient) -> str:
    groups: list[dict[str, Any]] = (await client.get("/api/v1/failures")).json()["groups"]
    return str(groups[0]["group"]["key"])


async def test_every_page_has_its_data_and_what_it_answers_is_what_the_description_says(backend: Backend) -> None:
    async with watched(backend, root="/a/b") as client:
        described = (await client.get("/api/v1/openapi.json")).json()
        assert described["servers"] == [{"url": "/a/b/api/v1"}]
        assert list(described["paths"]) == [one.path for one in ENDPOINTS]
        assert {DATA.get(page.path, page.path) for page in PAGES} <= {*described["paths"]}
        key = await group_of(client)
        for one in ENDPOINTS:
            answer = await client.get(filled(one.path, key), params={"id": "m-0"} if one.path == "/find" else {})
            assert answer.status_code == 200, one.path
            if one.type is None:
                continue
            schema = described["paths"][one.path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            (name,) = re.findall(r"#/components/schemas/(\w+)", schema["$ref"])
            parts = described["components"]["schemas"][name]
            assert {*parts["required"]} <= {*answer.json()} <= {*parts["properties"]}, one.path


async def test_numbers_say_when_they_were_counted_and_whether_they_are_exact(backend: Backend) -> None:
    async with watched(backend) as client:
        page = (await client.get("/api/v1/queues", params={"limit": 1})).json()
        (mail,) = page["queues"]
        assert (mail["queue"], mail["ready"], mail["leased"], mail["delayed"], mail["failed"]) == ("mail", 3, 1, 1, 1)
        assert (mail["exact"], mail["sampled_at"] <= page["sampled_at"], page["next"]) == (True, True, "mail")
        rest = (await client.get("/api/v1/queues", params={"after": page["next"]})).json()
        assert ([one["queue"] for one in rest["queues"]], rest["next"]) == (["raw"], None)


async def test_lists_and_searches_are_paged(backend: Backend) -> None:
    async with watched(backend) as client:
        path = "/api/v1/queues/mail/messages"
        for query in ({}, {"text": "example.org"}):
            found: list[str] = []
            after: str | None = ""
            while after is not None:
                page = (await client.get(path, params={**query, "limit": 2, "after": after})).json()
                found += [one["id"] for one in page["messages"]]
                after = page["next"]
            assert found == ["m-2", "m-3", "m-4"]
            assert (page["total"], page["exact"], "searched" in page) == (3, True, True)
        events = (await client.get("/api/v1/activity", params={"limit": 4, "event": "acked"})).json()
        assert ([one["id"] for one in events["events"]], events["next"]) == (["old-5", "old-3", "old-1"], None)


async def test_a_viewer_gets_no_secret_by_any_way(backend: Backend) -> None:
    for role, seen in (("admin", True), ("viewer", False)):
        async with watched(backend, role=role) as client:
            key = await group_of(client)
            texts = [
                (await client.get(filled(one.path, key), params={"id": "m-0"})).text
                for one in ENDPOINTS
                if one.path.partition("{")[0] in {"/queues/", "/failures/"}
            ]
            assert ("k-123" in "".join(texts)) is seen
        assert "host 7 refused" in "".join(texts)


async def test_messages_are_exported_as_json_lines(backend: Backend) -> None:
    async with watched(backend) as client:
        export = await client.get("/api/v1/queues/mail/export", params={"text": "EXAMPLE"})
        assert export.headers["content-type"] == "application/x-ndjson"
        assert sorted(json.loads(line)["id"] for line in export.text.splitlines()) == ["m-2", "m-3", "m-4"]
        two = await client.get("/api/v1/queues/mail/export", params={"limit": 2})
        assert len(two.text.splitlines()) == 2
        failed = await client.get("/api/v1/queues/mail/export", params={"state": "failed"})
        assert json.loads(failed.text)["error"] == ERROR
        raw = await client.get("/api/v1/queues/raw/export")
        assert {json.loads(line).get("body_base64") for line in raw.text.splitlines()} == {None, "AP8="}
        assert (await client.get("/api/v1/queues/absent/export")).status_code == 404


async def test_no_cell_of_a_table_is_a_formula(backend: Backend) -> None:
    await backend.publish("raw", [Draft(body=b'{"task":"@SUM(1)","args":[]}', id="formula", task="@SUM(1)")])
    async with watched(backend) as client:
        table = await client.get("/api/v1/queues/raw/messages", params={"format": "csv"})
        assert table.headers["content-disposition"] == 'attachment; filename="messages.csv"'
        rows = {row["id"]: row for row in csv.DictReader(io.StringIO(table.text))}
        assert rows["plain"]["body"] == "'=1+1"
        assert [cell for row in rows.values() for cell in row.values() if cell.startswith(("=", "+", "-", "@"))] == []
        queues = csv.DictReader(io.StringIO((await client.get("/api/v1/queues?format=csv")).text))
        assert [(row["queue"], row["ready"]) for row in queues] == [("mail", "3"), ("raw", "3")]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/absent", 404, "there is no such page"),
        ("/queues/absent", 404, "there is no queue absent"),
        ("/queues/mail/messages?state=lost", 400, "state must be one of"),
        ("/queues/mail/messages?limit=0", 400, "limit must be a number"),
        ("/queues/mail/samples?range=2y", 400, "the range must be one of"),
        ("/queues/mail/messages/absent", 404, "has no message with this id"),
    ],
)
async def test_what_is_wrong_is_one_line_of_json(backend: Backend, path: str, status: int, text: str) -> None:
    async with watched(backend) as client:
        answer = await client.get(f"/api/v1{path}")
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
        assert text in answer.json()["error"]


async def test_a_store_that_is_down_is_said_and_not_shown_as_empty() -> None:
    async with watched(None) as client:
        listed = await client.get("/api/v1/queues")
        assert (listed.status_code, "connection refused" in listed.json()["problem"]) == (200, True)
        for path in ("/queues/mail", "/activity"):
            answer = await client.get(f"/api/v1{path}")
            assert (answer.status_code, "connection refused" in answer.json()["error"]) == (503, True)


async def test_programs_send_a_token_and_probes_need_none(backend: Backend) -> None:
    login = Login(Secrets(admin="admin-token", viewer="viewer-token"))
    async with watched(backend, login=login, hosts={"queues.example"}) as client:
        refused = await client.get("/api/v1/queues")
        assert (refused.status_code, "Bearer" in refused.json()["error"]) == (401, True)
        for token, status in (("viewer-token", 200), ("another-token", 401)):
            answer = await client.get("/api/v1/queues", headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == status
        body = await client.get(
            "/api/v1/queues/mail/messages/m-0/body", headers={"authorization": "Bearer viewer-token"}
        )
        assert (body.status_code, body.json()["error"]) == (403, "a viewer cannot download bodies")
        probe = await client.get("/healthz", headers={"host": "10.0.0.7:8081"})
        assert (probe.status_code, probe.text) == (200, "ok\n")


def test_the_reference_has_every_endpoint_with_its_fields() -> None:
    text = REFERENCE.read_text()
    rows = dict(re.findall(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE))
    wanted = {one.path: {field.name for field in one.fields} | ({"format"} if one.rows else set()) for one in ENDPOINTS}
    assert {path: {*re.findall(r"`(\w+)`", fields)} for path, fields in rows.items()} == wanted
