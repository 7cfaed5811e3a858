"""Envelopes: what is written can be read, and what strangers write is never an error of ours."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qworker.envelope import Envelope, EnvelopeEncoder, open_envelope
from qworker.errors import InvalidArguments

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.text(),
    st.lists(JSON, max_size=3),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.dictionaries(st.text(), st.text(), max_size=3),
)
def test_a_call_comes_out_as_it_went_in(task, args, kwargs, headers):
    body = EnvelopeEncoder(task).encode(tuple(args), kwargs, headers)
    assert open_envelope(body) == Envelope(task, args, kwargs, headers)
    # Any language's JSON reader understands it.
    assert json.loads(body)["task"] == task


@given(st.binary(max_size=200))
def test_any_bytes_are_read_without_an_error(body):
    # Hypothesis knows this code's constants: now and then its bytes are an object that names a task.
    assert open_envelope(body) is None or (body.strip().startswith(b"{") and b'"task"' in body)


@given(st.dictionaries(st.sampled_from(["task", "args", "kwargs", "headers", "more"]), JSON))
def test_any_object_is_an_envelope_or_a_damaged_one_or_none(value):
    opened = open_envelope(json.dumps(value).encode())
    if not isinstance(value.get("task"), str):
        assert opened is None
    elif isinstance(opened, Envelope):
        assert opened.task == value["task"]
    else:
        assert opened[0] == value["task"]
        assert opened[1]


def test_a_body_nested_without_end_is_no_envelope():
    assert open_envelope(b"[" * 100_000) is None
    nested = b'{"task":"a","args":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert open_envelope(nested) is None


@pytest.mark.parametrize("argument", [object(), {1, object()}, 2**70j])
def test_an_argument_without_a_json_form_is_the_callers_mistake(argument):
    with pytest.raises(InvalidArguments, match="'work'"):
        EnvelopeEncoder("work").encode((argument,), {}, {})


def test_an_argument_that_holds_itself_is_the_callers_mistake():
    endless = []
    endless.append(endless)
    with pytest.raises(InvalidArguments):
        EnvelopeEncoder("work").encode((endless,), {}, {})
