"""What a health port answers, to whom, and what it does not put up with."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from qworker.errors import UsageError
from qworker.health.address import keep_across_exec, listen, loopback_for, parse_address
from qworker.health.answers import HealthAnswers, WorkerReports
from qworker.health.monitor import LoopHeartbeat, Monitor
from qworker.health.probe import fetch_page
from qworker.health.server import HealthServer
from qworker.health.worker_report import WorkerReport
from qworker.message import QueueStats
from qworker.sampling import QueueSnapshot, StoreSnapshot
from qworker.worker import Worker
from qworker.worker.metrics import FeatureCounts, TaskCounts, merge_counts

PATIENCE = 30.0


def report(pid: int = 1, **fields: Any) -> WorkerReport:
    queues = [
        QueueStats(queue="a.b", ready=3, leased=2, oldest_age_s=1.5),
        QueueStats(queue="off", ready=9, paused=True),
    ]
    given = {"life": f"{pid}-1", "state": "working", "concurrency": 10, "queues": queues, "looked_at": time.time()}
    return WorkerReport(pid=pid, **(given | fields))


@contextmanager
def served(reports: Callable[[], list[WorkerReport]], **options: Any) -> Iterator[HealthServer]:
    server = HealthServer(
        listen(("127.0.0.1", 0)),
        HealthAnswers(reports, stall_timeout=60.0, own_metrics=options.pop("own", False)),
        # A client that stands still between its connection and its request is answered too.
        **{"deadline": PATIENCE, **options},
    )
    try:
        yield server
    finally:
        server.close()
        assert "qworker-health" not in {thread.name for thread in threading.enumerate()}


def raw(server: HealthServer, request: bytes, *, end: bool = True) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        received = b""
        while end and (part := connection.recv(65536)):
            received += part
        return received


def page(server: HealthServer, path: str) -> tuple[int, str]:
    return fetch_page(f"127.0.0.1:{server.port}", path, PATIENCE)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_a_loop_that_has_stood_still_for_longer_than_the_limit_is_not_alive() -> None:
    reports = [report(1), report(2, stalled=60.0)]
    with served(lambda: reports) as server:
        assert page(server, "/livez") == (200, "ok\n")
        reports[1] = report(2, stalled=60.5)
        status, text = page(server, "/livez")
        assert status == 503
        assert "worker 2" in text


@pytest.mark.parametrize(
    ("reports", "ready", "why"),
    [
        ([report()], 200, "ok"),
        ([report(1, state="draining"), report(2)], 200, "ok"),
        ([report(state="draining")], 503, "draining"),
        ([report(state="quiet")], 503, "quiet"),
        ([report(state="starting")], 503, "starting"),
        ([report(problem="no route to the store")], 503, "no route to the store"),
        ([], 503, "starting"),
    ],
)
def test_ready_means_that_some_worker_takes_messages(reports: list[WorkerReport], ready: int, why: str) -> None:
    with served(lambda: reports) as server:
        assert page(server, "/readyz") == (ready, f"{why}\n")
        assert page(server, "/livez")[0] == 200


def test_a_service_that_is_told_to_stop_is_not_ready_while_its_workers_still_are() -> None:
    view = HealthAnswers(lambda: [report()], stall_timeout=60.0, stopping=lambda: True)
    assert view.ready() == (False, "draining")
    assert view.live()[0]


# -- scalers and scrapers ----------------------------------------------------------------------------------------------


def test_the_backlog_of_paused_queues_starts_no_pods() -> None:
    with served(lambda: [report(1), report(2, looked_at=1.0, queues=[QueueStats(queue="a.b", ready=99)])]) as server:
        status, text = page(server, "/stats")
    stats = msgspec.json.decode(text)
    assert status == 200
    assert (stats["backlog"], stats["ready"], stats["workers"], stats["concurrency"]) == (5, 3, 2, 20)
    assert stats["queues"]["off"]["paused"]
    assert stats["queues"]["a.b"]["oldest_age_s"] == 1.5


def test_a_scaler_is_told_nothing_rather_than_zero_before_the_first_look() -> None:
    with served(lambda: [report(looked_at=None, queues=[])]) as server:
        assert page(server, "/stats")[0] == 503


def test_prometheus_own_parser_reads_the_page() -> None:
    from prometheus_client import parser

    awkward = TaskCounts(queue="a.b", task='new\nline "quoted" \\', acked=3, lost=1, attempts=4, seconds=2.5)
    awkward.durations[0], awkward.durations[-1], awkward.tries[2] = 2, 1, 3
    with served(lambda: [report(counts=[awkward])], own=True) as server:
        status, text = page(server, "/metrics")
    assert status == 200
    samples = {
        (sample.name, sample.labels.get("qworker_outcome", ""), sample.labels.get("le", "")): sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    acked = samples["messaging_client_consumed_messages_total", "acked", ""]
    assert acked.value == 3
    assert acked.labels["qworker_task"] == awkward.task
    assert samples["messaging_process_duration_seconds_bucket", "", "0.001"].value == 2
    assert samples["messaging_process_duration_seconds_bucket", "", "+Inf"].value == 3
    assert samples["messaging_process_duration_seconds_count", "", ""].value == 3
    assert samples["messaging_process_duration_seconds_sum", "", ""].value == 2.5
    assert samples["qworker_message_tries_sum", "", ""].value == 4
    assert samples["qworker_leases_lost_total", "", ""].value == 1
    assert samples["qworker_queue_oldest_age_seconds", "", ""].value in {0.0, 1.5}
    assert samples["qworker_backend_up", "", ""].value == 1
    # What the app counts by itself comes along.
    assert ("python_info", "", "") in samples


def test_a_feature_that_is_not_used_has_no_metric() -> None:
    plain = TaskCounts(queue="a.b", task="resize", acked=3)
    with served(lambda: [report(counts=[plain])]) as server:
        before = page(server, "/metrics")[1]
    used = FeatureCounts()
    used.add("results", "done", "a.b", "resize", 2)
    used.add("ticks", "missed", "elsewhere")
    # A worker of a newer release counts what this one does not know.
    plain.features["lanes"] = {"parked": 1}
    with served(lambda: [report(counts=[plain, *used.counts()])]) as server:
        after = page(server, "/metrics")[1]
    assert "results_stored" not in before
    assert "ticks" not in before
    new = [line for line in after.splitlines() if "feature" in line or line not in before.splitlines()]
    queue = 'messaging_destination_name="a.b",messaging_operation_name="process",messaging_system="qworker"'
    assert f'qworker_results_stored_total{{{queue},qworker_outcome="done",qworker_task="resize"}} 2.0' in new
    (ticks,) = [line for line in new if "elsewhere" in line]
    assert ticks.startswith("qworker_schedule_ticks_total{")
    assert ticks.endswith('qworker_outcome="missed"} 1.0')


def test_openmetrics_is_served_to_who_asks_for_it() -> None:
    from prometheus_client.openmetrics import parser

    counts = TaskCounts(queue="a.b", task="resize", acked=3, attempts=4, seconds=2.5)
    request = b"GET /metrics HTTP/1.1\r\n%s\r\n"
    # What Prometheus sends.
    accept = b"Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1\r\n"
    with served(lambda: [report(counts=[counts])], own=True) as server:
        head, _, body = raw(server, request % accept).partition(b"\r\n\r\n")
        plain = raw(server, request % b"")
        odd = raw(server, request % b"Accept: application/openmetrics-text;version=new\r\n")
    assert b"\r\ncontent-type: application/openmetrics-text; version=1.0.0; charset=utf-8" in head
    families = {family.name: family for family in parser.text_string_to_metric_families(body.decode())}
    assert families["messaging_client_consumed_messages"].samples[0].value == 3
    assert families["messaging_process_duration_seconds"].type == "histogram"
    assert "python_info" in families
    assert b"\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n" in plain
    assert b"# EOF" not in plain
    assert odd.startswith(b"HTTP/1.1 200 ")


def test_metrics_that_an_app_shares_between_processes_are_on_the_page_of_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    app = "from prometheus_client import Counter; Counter('letters', 'Letters.').inc(3)"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", app], check=True, timeout=PATIENCE)
    with served(lambda: [report()]) as server:
        status, text = page(server, "/metrics")
    assert status == 200
    assert "\nletters_total 6.0\n" in text
    assert "\nqworker_workers 1.0\n" in text


def test_a_process_without_a_health_port_imports_no_server() -> None:
    code = (
        "import sys, qworker.cli.run, qworker.supervisor.supervisor, qworker.supervisor.worker_main\n"
        "print(sorted({'uvicorn', 'httptools', 'prometheus_client'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_counters_never_fall_when_a_worker_dies_or_begins_again() -> None:
    now = [0.0]
    fleet = WorkerReports(lambda: now[0])
    view = HealthAnswers(fleet.reports, stall_timeout=60.0, past=fleet.past_counts, own_metrics=False)

    def acked() -> int:
        return sum(
            cell.acked for cell in merge_counts([*fleet.past_counts(), *(c for r in fleet.reports() for c in r.counts)])
        )

    fleet.add_report(1, report(1, counts=[TaskCounts("q", "t", acked=5)]))
    fleet.add_report(2, report(2, counts=[TaskCounts("q", "t", acked=7)]))
    assert acked() == 12
    fleet.add_report(3, report(3, counts=[TaskCounts("q", "t", features={"results": {"done": 4}})]))
    fleet.remove_process(3)
    assert b'qworker_outcome="done",qworker_task="t"} 4.0' in view.metrics()[0]
    fleet.add_report(1, report(1, life="fresh", counts=[TaskCounts("q", "t", acked=1)]))
    assert acked() == 13
    fleet.remove_process(2)
    assert acked() == 13
    assert b"qworker_workers 1.0\n" in view.metrics()[0]
    now[0] = 61.0
    assert not view.live()[0], "a silent worker's loop stands still, or all of it does"
    fleet.remove_process(1)
    assert view.live()[0]
    assert acked() == 13


async def test_a_pulse_stands_still_with_its_loop() -> None:
    import asyncio

    now = [100.0]
    pulse = LoopHeartbeat(lambda: now[0])
    assert pulse.stalled_seconds() == 0.0
    beating = asyncio.create_task(pulse.beat())
    await asyncio.sleep(0)
    now[0] = 170.5
    assert pulse.stalled_seconds() == 70.0
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert pulse.stalled_seconds() == 0.0, "a loop that has ended does not stand still"


# -- who is answered, and what is not put up with ----------------------------------------------------------------------


def test_probes_need_no_token_and_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWORKER_HTTP_TOKEN", raising=False)
    with served(lambda: [report()], token="open-sesame") as server:
        assert [page(server, path)[0] for path in ("/livez", "/readyz", "/stats", "/metrics")] == [200, 200, 401, 401]
        for given in ("Bearer wrong", "open-sesame", "Basic open-sesame", "Bearer", "Bearer s\u00e9same"):
            answer = raw(server, f"GET /stats HTTP/1.1\r\nAuthorization: {given}\r\n\r\n".encode("latin-1"))
            assert answer.startswith(b"HTTP/1.1 401 "), given
        assert raw(server, b"GET /stats?a=1 HTTP/1.1\r\nauthorization: bearer open-sesame\r\n\r\n").startswith(
            b"HTTP/1.1 200"
        )
        monkeypatch.setenv("QWORKER_HTTP_TOKEN", "open-sesame")
        assert [page(server, path)[0] for path in ("/stats", "/metrics")] == [200, 200]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /livez HTTP/1.1\r\n\r\n", 405),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/2.0\r\n\r\n", 400),
        (b"\xff\x00\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 20000 + b"\r\n\r\n", 431),
    ],
)
def test_what_is_no_good_request_is_told_so(request_bytes: bytes, status: int) -> None:
    with served(lambda: [report()]) as server:
        try:
            answer = raw(server, request_bytes)
        except ConnectionResetError:
            # The end of a request that is too long was never read.
            assert status == 431
        else:
            assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert page(server, "/livez")[0] == 200


def test_head_has_no_body() -> None:
    with served(lambda: [report()]) as server:
        head, _, body = raw(server, b"HEAD /livez HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert b"\r\ncontent-length: 3\r\n" in head + b"\r\n"
    assert not body


def test_slow_and_many_clients_keep_nobody_from_an_answer() -> None:
    with served(lambda: [report()], deadline=1.0) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)]
        try:
            idle[0].sendall(b"GET /livez HT")
            idle += [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(80)]
            deadline = time.monotonic() + PATIENCE
            while page(server, "/livez")[0] != 200:
                assert time.monotonic() < deadline
            # It may have given way before the server read from it.
            with contextlib.suppress(ConnectionResetError):
                assert idle[0].recv(100).startswith(b"HTTP/1.1 408 ")
        finally:
            for connection in idle:
                connection.close()


@pytest.mark.parametrize("drops", [b"GET /" + b"a" * 8000, b"\r\n" * 4000], ids=["a request", "empty lines"])
def test_a_byte_now_and_then_does_not_keep_a_connection(drops: bytes) -> None:
    with (
        served(lambda: [report()], deadline=1.0) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        connection.settimeout(0.05)
        answer = None
        for drop in drops:
            try:
                connection.sendall(bytes([drop]))
                answer = connection.recv(100)
                break
            except TimeoutError:
                continue
            except OSError:
                answer = b""
                break
        assert answer is not None, "the server still waits for more"
        assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


def test_64_silent_connections_keep_no_probe_from_its_answer() -> None:
    with served(lambda: [report()], deadline=PATIENCE) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(64)]
        assert page(server, "/livez") == (200, "ok\n")
        for connection in idle:
            connection.close()


async def test_it_answers_while_the_event_loop_is_blocked() -> None:
    with served(lambda: [report()]) as server:
        # The call blocks this loop.
        assert page(server, "/livez") == (200, "ok\n")


def test_each_connection_has_one_request() -> None:
    request = b"GET /livez HTTP/1.1\r\n\r\n"
    with served(lambda: [report()]) as server:
        answer = raw(server, request * 3)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 1
    assert b"\r\nconnection: close\r\n" in answer


def test_a_page_that_fails_leaves_the_others() -> None:
    def broken() -> list[WorkerReport]:
        raise RuntimeError("broken")

    with served(broken) as server:
        assert page(server, "/livez")[0] == 500
        assert page(server, "/nothing")[0] == 404


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "asked"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080), "127.0.0.1"),
        ("0.0.0.0:1", ("0.0.0.0", 1), "127.0.0.1"),
        (":0", ("", 0), "127.0.0.1"),
        ("[::]:9", ("::", 9), "::1"),
        ("localhost:65535", ("localhost", 65535), "localhost"),
    ],
)
def test_addresses(text: str, address: tuple[str, int], asked: str) -> None:
    assert parse_address(text) == address
    assert loopback_for(address[0]) == asked


@pytest.mark.parametrize("text", ["", "8080", "host", "host:", "::1:80", "host:65536", "host:-1", "host:\u0663"])
def test_a_bad_address_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_a_worker_is_ready_before_a_large_queue_is_counted() -> None:
    monitor = Monitor(1)
    monitor.attach(cast("Worker", SimpleNamespace(observers=[], state="working")))
    assert monitor.state() == "starting"
    monitor._take(StoreSnapshot(at=1.0, queues=[QueueSnapshot(queue="deep")]), ["deep"])
    assert monitor.state() == "working"
    # A number that is missing is not 0.
    assert monitor.queues() == []


def test_an_address_that_is_taken_is_one_line() -> None:
    with listen(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="cannot listen there"):
        listen(taken.getsockname())


def test_who_asks_while_a_process_replaces_itself_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QWORKER_HEALTH_FD", raising=False)
    before = listen(("127.0.0.1", 0))
    port = before.getsockname()[1]
    keep_across_exec(before)
    assert before.get_inheritable()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as waiting:
        after = listen(("127.0.0.1", port))
        before.detach()
        assert not after.get_inheritable()
        server = HealthServer(after, HealthAnswers(lambda: [report()], stall_timeout=60.0, own_metrics=False))
        try:
            waiting.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            assert waiting.recv(100).startswith(b"HTTP/1.1 200 ")
        finally:
            server.close()


def test_a_probe_of_nobody_says_so() -> None:
    with listen(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    status, text = fetch_page(f"http://127.0.0.1:{port}/livez", "/readyz", PATIENCE)
    assert status == 0
    assert "does not answer" in text
    with pytest.raises(UsageError):
        fetch_page("https://127.0.0.1:1/livez", "/livez", 1.0)
