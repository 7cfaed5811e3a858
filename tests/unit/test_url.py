"""URLs: read in one place, and never shown with their password."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidURL
from qworker.url import BackendURL, mask


@pytest.mark.parametrize(
    ("text", "directory"),
    [
        ("file:///var/spool/app", Path("/var/spool/app")),
        ("file:/var/spool/app", Path("/var/spool/app")),
        ("file://./spool", Path.cwd() / "spool"),
        ("file:./spool", Path.cwd() / "spool"),
        ("file:spool", Path.cwd() / "spool"),
        ("file:///a%20b?sync=off", Path("/a b")),
    ],
)
def test_directories(text, directory):
    assert BackendURL.parse(text).directory == directory


@pytest.mark.parametrize("text", ["file:", "file://", "file://host/dir"])
def test_what_names_no_directory_is_refused_with_the_mend(text):
    with pytest.raises(InvalidURL):
        _ = BackendURL.parse(text).directory


@pytest.mark.parametrize("text", ["", "nothing", "://x", "file:a\nb", "file:a\x00", "FILE:a", "redis://h?a=1&a=2"])
def test_what_is_no_url_is_refused(text):
    with pytest.raises(InvalidURL):
        BackendURL.parse(text)


@given(st.text(st.characters(codec="ascii", exclude_characters="/?#@:", categories=("L", "N", "P")), min_size=4))
def test_a_password_is_masked_everywhere(password):
    text = f"redis://user:{password}@host:6379/0?x=1"
    assert password not in mask(text).removeprefix("redis://user:").partition("@")[0]
    assert BackendURL.parse(text).masked == "redis://user:***@host:6379/0?x=1"


def test_options_are_checked_by_name_and_by_kind():
    url = BackendURL.parse("file:a?sync=off&keep=3&on=yes")
    with pytest.raises(InvalidURL, match="Options: keep, on"):
        url.only({"keep", "on"})
    assert (url.integer("keep", 0), url.integer("other", 7), url.boolean("on", False)) == (3, 7, True)
    assert url.choice("sync", "full", ["off", "full"]) == "off"
    for wrong in (
        lambda: url.integer("sync", 0),
        lambda: url.integer("keep", 0, minimum=4),
        lambda: url.boolean("keep", False),
        lambda: url.choice("sync", "full", ["full"]),
    ):
        with pytest.raises(InvalidURL):
            wrong()
