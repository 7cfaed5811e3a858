"""Each kind of public name has one table on one page that lists every such name, and no other."""

from __future__ import annotations

import re

from qworker.cli.configured import OPTIONS
from tests.reference import ROOT, command_names, settings, table, tables, url_options, variables, written_settings

CONFIGURATION = "docs/configuration.md"
# Schemes that the tables name by one of them.
FAMILIES = {
    "redis": {"redis", "rediss", "unix", "redis+sentinel", "redis+cluster"},
    "mq+http": {"mq+http", "mq+https"},
}


def name_of(cell: str) -> str:
    found = re.fullmatch(r"`([^`]+)`", cell)
    assert found is not None, f"{cell!r} is not a name"
    return found[1]


def test_the_table_of_url_options_has_every_option_of_every_scheme() -> None:
    listed: dict[str, set[str]] = {}
    for option, stores, default, meaning in table(CONFIGURATION, "URL options"):
        assert default, option
        assert meaning, option
        for store in stores.split(", "):
            scheme = name_of(store).removesuffix(":")
            for one in FAMILIES.get(scheme, {scheme}):
                listed.setdefault(one, set()).add(name_of(option))
    assert listed == url_options()


def test_the_tables_of_variables_have_every_variable() -> None:
    listed = [name_of(row[0]) for rows in tables(CONFIGURATION, "Environment variables") for row in rows]
    assert sorted(listed) == sorted(variables())


def test_the_table_of_settings_has_every_option_of_every_command() -> None:
    assert (ROOT / CONFIGURATION).read_text() == written_settings(), "write it again: python -m tests.reference"
    listed = {name_of(row[0]).replace("-", "_") for row in table(CONFIGURATION, "Settings in pyproject.toml")}
    assert listed == {*settings()} - {"url"}
    assert listed <= OPTIONS


def test_the_page_of_the_command_line_has_a_section_for_every_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert sorted(re.findall(r"^## `qworker ([^`]+)`$", text, re.MULTILINE)) == sorted(command_names())
    grouped = [
        name for row in tables("docs/cli.md", "The command line")[-1] for name in re.findall(r"\[`(\S+)`\]", row[1])
    ]
    assert sorted(grouped) == sorted(name for name in command_names() if " " not in name)
