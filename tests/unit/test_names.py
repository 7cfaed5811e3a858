"""What may cross a process's border, and what may not."""

import os
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.errors import InvalidName
from qworker.names import check_id, check_key, check_queue, new_id, new_ids, printable


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "0", "x" * 64])
def test_queue_names(name):
    assert check_queue(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", ".a", "a/b", "a\n", "a\x00", "ä", "x" * 65, "a b", "../a", "a%2fb", "a\\b", "{a}"]
)
def test_what_could_leave_its_place_is_no_queue_name(name):
    with pytest.raises(InvalidName):
        check_queue(name)


@given(st.text(max_size=150))
def test_whatever_passes_is_one_plain_path_segment(text):
    for check in (check_queue, check_id):
        try:
            check(text)
        except InvalidName as error:
            assert str(error).isprintable()  # noqa: PT017 - most texts are refused, and some are not
        else:
            assert os.path.basename(text) == text
            assert text not in {".", ".."}
            assert text.isascii()
            assert text.isprintable()


@pytest.mark.parametrize("key", ["", "x" * 256, "ä" * 128])
def test_a_key_has_its_bounds_in_bytes(key):
    with pytest.raises(InvalidName):
        check_key(key)
    assert check_key("x" * 255)


def test_ids_rise_are_unique_and_can_be_checked():
    ids = [*new_ids(1000), *(new_id() for _ in range(1000)), *new_ids(1000)]
    assert ids == sorted(set(ids))
    assert all(check_id(made) == made for made in ids)
    assert re.fullmatch(r"\d{14}_\d{9}_\d+_[A-Za-z0-9.-]+-[0-9a-f]{8}", ids[0])


def test_ids_of_threads_do_not_collide():
    made: list[str] = []
    threads = [threading.Thread(target=lambda: made.extend(new_id() for _ in range(2000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8000


FORK = """
import os
from qworker.names import new_id
ours = new_id()
if os.fork() == 0:
    print(ours, new_id(), os.getpid(), flush=True)
    os._exit(0)
os.wait()
"""


def test_ids_of_a_forked_child_are_its_own():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=50)
    ours, theirs, pid = done.stdout.split()
    assert theirs.split("_")[2] == pid
    assert theirs.split("_")[3] != ours.split("_")[3]


@given(st.text())
def test_printable_text_cannot_draw_on_a_terminal(text):
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", printable(text))
    printable(text).encode()
