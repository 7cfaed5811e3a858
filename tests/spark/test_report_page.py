"""The report's page in a real browser: it shows its plots, runs nothing, and asks for nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest
from markupsafe import Markup
from playwright.sync_api import Browser, Page

from qworker.charts import Scale, Series, count_scale, format_text, line_chart, number_scale, seconds_scale
from qworker.cli.main import main
from qworker.errors import MissingExtra
from qworker.pipeline.report import page
from qworker.pipeline.report.format import format_count, format_rate, format_seconds
from qworker.pipeline.report.model import (
    Depth,
    Failures,
    Percentiles,
    QueueTotals,
    Report,
    TaskTimes,
    TimeStep,
    WorkerShare,
)
from tests.support.browser import open_browser
from tests.support.missing_modules import output_without

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.timeout(300)]

START = 1_763_971_200.0
# What a message could bring: each would run, load or break something if it were taken for markup.
HOSTILE = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "</title></style><svg onload=\"document.title='owned'\">",
    "' onmouseover='document.title=1' \x1b[31m\x00\ud800",
)


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture
def tab(browser: Browser) -> Generator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def made(name: str) -> Report:
    """A report in which everything that a message brings is `name`."""
    times = Percentiles(p50=0.02, p90=0.5, p99=2.0, max=9.0)
    totals = QueueTotals(
        queue=name, enqueued=90, done=60, failed=10, open=20, runs=80, retried=10, released=0, lost=0, per_second=0.1
    )
    task = TaskTimes(queue=name, task=name, done=60, failed=10, begun=70, wait=times, runs=80, run=times)
    return Report(
        source=f"file:///{name}",
        made_at=START + 600,
        since=START,
        until=START + 600,
        step_s=60.0,
        queues=[totals],
        tasks=[task],
        failures=[Failures(queue=name, task=name, error=name, example=name, failed=10, retried=10)],
        workers=[WorkerShare(worker=name, runs=80, failed=20, busy_s=30.0)],
        moments=[
            TimeStep(at=START + 60 * i, enqueued=9 * i, done=6 * i, failed=1, retried=1, wait=times, run=None)
            for i in range(10)
        ],
        depths=[Depth(queue=name, counts=[2 * i for i in range(10)])],
    )


@pytest.mark.parametrize("words", [pytest.param("".join(HOSTILE), id="hostile")])
def test_nothing_that_a_message_brings_is_taken_for_markup(words: str, tmp_path: Path, tab: Page) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(made(words)))
    tab.goto(file.as_uri())
    assert tab.title().startswith("qworker report: file:///")
    seen = tab.content()
    # As text they are all there; as elements and attributes, none.
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in seen
    outside = re.sub(r">[^<]*<", "><", seen)
    assert not re.search(r"<(script|img|iframe|object|link)\b", outside)
    assert not re.search(r"<[^>]*\son\w+=", re.sub(r'"[^"]*"', '""', outside))
    # The control: the same browser does run what is not escaped.
    file.write_text(f"<title>plain</title><p>{HOSTILE[0]}</p>")
    tab.goto(file.as_uri())
    assert tab.title() == "owned"


def test_the_policy_forbids_what_would_slip_through_and_lets_the_style_in(tmp_path: Path, tab: Page) -> None:
    text = page(made("thumbs"))
    file = tmp_path / "report.html"
    file.write_text(text.replace("</header>", f"{HOSTILE[0]}{HOSTILE[1]}</header>"))
    tab.goto(file.as_uri())
    assert tab.title() == "qworker report: file:///thumbs"
    # The style sheet's hash is right, and the lines of the charts have its colours.
    strokes = tab.eval_on_selector_all("path.line", "(all) => all.map((one) => getComputedStyle(one).stroke)")
    assert len({*strokes}) == 4
    assert "none" not in strokes


def test_a_page_names_no_other_place() -> None:
    text = page(made("thumbs"))
    assert not re.search(r"(src|href|url|@import|action)\s*[=(]", text)
    assert "http" not in text.replace("http-equiv", "")


def test_a_page_of_nothing_is_a_page() -> None:
    empty = msgspec.structs.replace(made("x"), queues=[], tasks=[], failures=[], workers=[], moments=[], depths=[])
    assert page(empty).endswith("</html>\n")


def test_text_on_the_page_has_no_control_characters_and_keeps_its_lines() -> None:
    text = page(made("a\x1b[31m\nb\x00\ud800"))
    assert "a?[31m\nb??</td>" in text
    assert not set(text) & {"\x1b", "\x00", "\ud800"}
    assert format_text(Markup("<b>\x1b</b>")) == "<b>\x1b</b>"


def test_only_the_page_needs_jinja_and_says_so_before_the_report_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import qworker.pipeline.jobs.replay\n"
        "from qworker.errors import MissingExtra\n"
        "from qworker.pipeline.report import page, report\n"
        "try: page(None)\n"
        "except MissingExtra as error: print(error)\n"
    )
    assert output_without(("jinja2", "markupsafe"), program) == f"{MissingExtra('spark', 'the page of a report')}\n"
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["pipeline", "report", str(tmp_path / "nowhere"), "--html", str(tmp_path / "report.html")]) == 2
    expected = MissingExtra("spark", "qworker pipeline report --html")
    assert capsys.readouterr().err == f"qworker: {expected} [MissingExtra]\n"


def test_a_line_is_broken_where_there_is_no_value() -> None:
    drawn = line_chart("x", [0.0, 1.0, 2.0, 3.0], [Series("a", [1.0, None, 2.0, 3.0])], format_count, count_scale)
    area, line = re.findall(r'd="([^"]*)"', drawn)
    assert (area.count("M"), area.count("Z")) == (2, 2)
    assert line == "M0.0 75.0h.01M666.7 50.0 1000.0 25.0"
    assert 'aria-label="x. a: now 3, least 1, most 3"' in drawn


@pytest.mark.parametrize(
    ("scale", "value", "values"),
    [
        (number_scale, 0, [0, 1]),
        (number_scale, 0.0042, [0, 0.002, 0.004, 0.006]),
        (number_scale, 1.1, [0, 0.4, 0.8, 1.2]),
        (number_scale, 123_456, [0, 50_000, 100_000, 150_000]),
        (count_scale, 1.1, [0, 1, 2]),
        (count_scale, 10.5, [0, 4, 8, 12]),
        (seconds_scale, 45, [0, 20, 40, 60]),
        (seconds_scale, 700, [0, 240, 480, 720]),
        (seconds_scale, 40_000, [0, 14_400, 28_800, 43_200]),
    ],
)
def test_a_scale_has_round_numbers(scale: Scale, value: float, values: list[float]) -> None:
    assert scale(value) == pytest.approx(values)


def test_figures_are_said_shortly() -> None:
    assert [format_seconds(s) for s in (0, 0.00025, 0.0032, 0.25, 5, 45.25, 600, 9000, 400_000)] == [
        "0 us",
        "250 us",
        "3.2 ms",
        "250 ms",
        "5 s",
        "45 s",
        "10 min",
        "2.5 h",
        "4.63 d",
    ]
    assert [format_count(n) for n in (0, 12_345, 0.25)] == ["0", "12,345", "0.25"]
    assert [format_rate(n) for n in (0, 0.01234, 12.34, 1234.5)] == ["0", "0.0123", "12.3", "1,234"]
