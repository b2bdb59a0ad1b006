"""Whatever a body holds, a route's reader returns a request or refuses it in the client's shape."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.records import Record, RecordPlace
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.chat_request import parse_chat_request
from kvstore_engine_adapter.faces.completion_request import parse_completion_request
from kvstore_engine_adapter.faces.parameters import TABLES, Use
from kvstore_engine_adapter.faces.response_request import parse_response_request
from kvstore_engine_adapter.faces.sessions import SessionHead
from kvstore_engine_adapter.faces.stored_responses import _read
from kvstore_engine_adapter.faces.tgi_request import parse_tgi_request

MESSAGES = [{"role": "user", "content": "x"}]
ROUTES = {
    "POST /v1/chat/completions": (parse_chat_request, {"model": "m", "messages": MESSAGES}),
    "POST /v1/completions": (parse_completion_request, {"model": "m", "prompt": "x"}),
    "POST /v1/responses": (parse_response_request, {"model": "m", "input": "x"}),
    "POST /generate, /generate_stream, /": (parse_tgi_request, {"inputs": "x"}),
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["user", "text", "message", "input_text", "none", "auto", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "session", "include_usage", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def outcome(read, body):
    try:
        read(json.dumps(body).encode())
    except ApiError as error:
        refusal = error
    else:
        return None
    assert refusal.status == 400
    assert "\n" not in refusal.message
    json.dumps(refusal.body, ensure_ascii=False).encode()
    return refusal


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
def test_any_values_of_known_parameters_are_taken_or_refused(route, data):
    read, least = ROUTES[route]
    names = [parameter.name for parameter in TABLES[route]]
    changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=5))
    if route.startswith("POST /generate"):
        inner = [at.name for at in TABLES[f"parameters in {route}"]]
        changes["parameters"] = data.draw(st.dictionaries(st.sampled_from(inner), VALUES, max_size=5))
    outcome(read, least | changes)


@pytest.mark.parametrize("route", ROUTES)
@given(value=VALUES, name=st.text(max_size=300))
def test_any_other_parameter_is_refused(route, name, value):
    read, least = ROUTES[route]
    if name not in {parameter.name for parameter in TABLES[route]}:
        assert outcome(read, least | {name: value}).code == "unknown_parameter"


@pytest.mark.parametrize("route", ROUTES)
@given(body=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_taken_or_refused(route, body):
    read, _ = ROUTES[route]
    with pytest.raises(ApiError) as refused:
        read(body)
    assert refused.value.status == 400


@pytest.mark.parametrize("route", ROUTES)
def test_what_means_off_is_taken_and_null_counts_as_absent(route):
    read, least = ROUTES[route]
    for parameter in TABLES[route]:
        if parameter.name not in least:
            assert outcome(read, least | {parameter.name: None}) is None
        if parameter.use is Use.REFUSED:
            for value in parameter.off:
                assert outcome(read, least | {parameter.name: value}) is None
            assert outcome(read, least | {parameter.name: [7]}).code == "unsupported_parameter"


RECORDS = st.dictionaries(
    st.sampled_from(["turns", "num_shared", "created_s", "forked_from", "format"]), VALUES, max_size=5
)


def head_in(value):
    data = json.dumps({"format": 1} | value).encode()
    try:
        return SessionHead.from_record("s", Record(data, 1, 10.0, RecordPlace.MEMORY)), None
    except ApiError as error:
        return None, error


@given(RECORDS)
def test_any_record_is_a_head_or_damaged(value):
    head, error = head_in(value)
    assert (error is None and 0 <= head.num_shared <= len(head.turns)) or error.code == "session_damaged"


def response_in(value):
    try:
        return _read(value, "r"), None
    except ApiError as error:
        return None, error


@given(st.dictionaries(st.sampled_from(["response", "items", "ancestors", "messages"]), VALUES, max_size=4))
def test_any_record_is_a_response_or_damaged(value):
    response, error = response_in(value)
    assert (error is None and response is not None) or error.code == "session_damaged"
