from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.uri import parse_uri

from openenv_client import protocol
from openenv_client.errors import (
    ConfigurationError,
    EnvironmentFailedError,
    OpenEnvError,
    ProtocolError,
    RequestError,
    ServerFullError,
    SessionFailedError,
)
from openenv_client.protocol import encode_reset, encode_step, parse_observation, parse_state, parse_unasked


def frame(kind: str = "observation", **data: Any) -> str:
    return json.dumps({"type": kind, "data": data})


# Addresses


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h:8000", "ws://h:8000/ws"),
        ("http://h:8000/", "ws://h:8000/ws"),
        ("ws://h:8000//", "ws://h:8000/ws"),
        ("ws://h:8000/ws", "ws://h:8000/ws"),
        ("ws://h:8000/ws/", "ws://h:8000/ws"),
        ("http://h/envs/sudoku", "ws://h/envs/sudoku/ws"),
        ("http://h//envs//sudoku/ws//", "ws://h/envs/sudoku/ws"),
        ("http://h/wss", "ws://h/wss/ws"),
        ("http://h:8000?token=a/b", "ws://h:8000/ws?token=a/b"),
    ],
)
def test_slashes_and_a_final_ws_make_no_difference(base_url: str, url: str) -> None:
    """U03."""
    assert protocol.websocket_url(base_url) == url


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("https://http-env.hf.space", "wss://http-env.hf.space/ws"),
        ("wss://h", "wss://h/ws"),
        ("HTTP://H:1", "ws://H:1/ws"),
        ("host:8000", "ws://host:8000/ws"),
        ("localhost", "ws://localhost/ws"),
        ("http:8000", "ws://http:8000/ws"),
        ("ws/envs/sudoku", "ws://ws/envs/sudoku/ws"),
        (" ws://h:1 \n", "ws://h:1/ws"),
        ("http://[::1]:8000", "ws://[::1]:8000/ws"),
        ("http://user:pass@h", "ws://user:pass@h/ws"),
    ],
)
def test_only_the_scheme_changes(base_url: str, url: str) -> None:
    """U05."""
    assert protocol.websocket_url(base_url) == url


@pytest.mark.parametrize(
    "base_url",
    [
        *[
            "",
            "   ",
            "http://",
            "http://:8000",
            "ftp://h",
            "http://h:port",
            "http://h:99999",
            "http://h:",
            "http://h:0",
            "http://user@h",
            "http://a%3Ab:c@h",
            "http://h/a@b",
            "http://%ff:x@h",
            "http://h/\x00",
            "http:/h:8000",
            "http//h:8000",
            "HTTPS//h",
        ],
        *[
            "http://a b",
            "http://h/a b",
            "http://[::1",
            f"http://{'a' * 64}.b",
            "http://h/#x",
            "://h",
            8000,
            b"http://h",
        ],
    ],
)
def test_what_is_no_address_is_refused_with_an_example(base_url: Any) -> None:
    """U05."""
    with pytest.raises(ConfigurationError, match="base_url") as caught:
        protocol.websocket_url(base_url)
    assert str(caught.value).endswith("for example http://127.0.0.1:8000.")


def test_no_secret_of_an_address_is_shown() -> None:
    assert protocol.public_url("ws://user:secret@h:1/ws?token=secret") == "ws://h:1/ws"


@pytest.mark.parametrize(
    "text",
    [
        "http://user:secret@h/#x",
        "user:secret@h:port",
        "http://user:se/secret@h",
        "http://user:12/secret@h:x",
        "http://user:se?secret@h:x",
        "http://[user:secret@h",
        "http://h:x?token=secret",
        "http://h:x?token=a@secret",
        "ftp://user:secret@h",
        "secret://h@x",
    ],
)
def test_an_address_that_is_refused_does_not_show_its_secret(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        protocol.websocket_url(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1", "127.8.9.1:1", "[::1]:80", "localhost."],
)
def test_loopback_hosts_are_known(host: str) -> None:
    assert protocol.is_loopback(f"ws://{host}/ws")


@pytest.mark.parametrize("host", ["localhost.example", "128.0.0.1", "10.0.0.1", "env.hf.space", "[2001:db8::1]"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not protocol.is_loopback(f"ws://{host}/ws")


def test_a_missing_colon_is_what_the_message_names() -> None:
    with pytest.raises(ConfigurationError, match="'http//h' lacks a colon after the scheme"):
        protocol.websocket_url("http//h")


# Requests


def test_requests_have_the_shape_that_the_server_reads() -> None:
    assert json.loads(encode_reset({"seed": 7})) == {"type": "reset", "data": {"seed": 7}}
    assert json.loads(encode_step({"message": "[5 3 7]"})) == {"type": "step", "data": {"message": "[5 3 7]"}}
    assert json.loads(protocol.STATE) == {"type": "state"}
    assert json.loads(protocol.CLOSE) == {"type": "close"}


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("bad \ud83d [5 3 7]", "bad \ufffd [5 3 7]"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        ("é \U0001f600 \u2028 \ufeff", "é \U0001f600 \u2028 \ufeff"),
    ],
)
def test_half_characters_are_replaced_before_they_are_sent(text: str, sent: str) -> None:
    """W19."""
    request = encode_step({"message": text, text: 1})

    request.encode()
    assert "\\u" not in request.replace("\\u2028", "")
    assert json.loads(request)["data"] == {"message": sent, sent: 1}


@pytest.mark.parametrize(
    "action", ["[5 3 7]", None, ["a"], {"x": object()}, {"x": float("nan")}, {"x": {1, 2}}, {(1,): 2}]
)
def test_what_is_no_json_object_is_refused(action: Any) -> None:
    with pytest.raises(RequestError, match="action"):
        encode_step(action)
    with pytest.raises(RequestError, match="reset arguments"):
        encode_reset(action)


def test_an_action_that_contains_itself_is_refused() -> None:
    action: dict[str, Any] = {}
    action["self"] = action
    with pytest.raises(RequestError):
        encode_step(action)


# Replies


@pytest.mark.parametrize(
    ("data", "reward", "done"),
    [
        ({"observation": {"reward": 9, "done": False}, "reward": 1.0, "done": True}, 1.0, True),
        ({"observation": {"reward": 9, "done": True}, "reward": -2, "done": False}, -2.0, False),
        ({"observation": {"reward": 9}, "done": False}, None, False),
        ({"observation": {"done": True}, "reward": None}, None, False),
        ({"observation": {}, "reward": 0}, 0.0, False),
    ],
)
def test_reward_and_done_are_read_beside_the_observation(
    data: dict[str, Any], reward: float | None, done: bool
) -> None:
    """R01."""
    reply = parse_observation(frame(**data))

    assert reply == (data["observation"], reward, done, {})


def test_metadata_is_passed_on() -> None:
    assert parse_observation(frame(observation={}, metadata={"a": 1})).metadata == {"a": 1}
    assert parse_observation(frame(observation={}, metadata=None)).metadata == {}


WRONG_REWARDS: list[Any] = ["1", True, [1], {}, float("nan"), float("inf"), 10**400]
WRONG_FLAGS: list[Any] = [None, 0, 1, "false", []]
WRONG_METADATA: list[Any] = ["x", 1, [1]]


@pytest.mark.parametrize(
    "data",
    [
        *[{}, {"observation": None}, {"observation": "text"}, {"observation": []}],
        *({"observation": {}, "reward": wrong} for wrong in WRONG_REWARDS),
        *({"observation": {}, "done": wrong} for wrong in WRONG_FLAGS),
        *({"observation": {}, "metadata": wrong} for wrong in WRONG_METADATA),
    ],
)
def test_a_field_of_the_wrong_type_is_an_error_and_never_a_value(data: dict[str, Any]) -> None:
    """R01."""
    with pytest.raises(ProtocolError):
        parse_observation(frame(**data))


@pytest.mark.parametrize(
    "text",
    [
        *["", "garbage", "[]", "null", '"x"', "{}", b"\x00", b"{}", "[" * 100_000, frame("strange"), frame("state")],
        *['{"type":"observation"}', '{"type":"observation","data":[]}', '{"type":["error"],"data":{}}'],
        '{"type":"observation","data":{"observation":{"n":1' + "0" * 5000 + '},"reward":1e999}}',
    ],
)
def test_what_is_no_observation_is_an_error_that_shows_its_beginning(text: str | bytes) -> None:
    with pytest.raises(ProtocolError, match="the server's message") as caught:
        parse_observation(text)
    assert caught.value.reply == repr(text[:200])


def test_half_characters_in_a_reply_are_replaced() -> None:
    """W19."""
    reply = parse_observation(r'{"type":"observation","data":{"observation":{"a":"\ud83d [5]","b":"\uD83D\uDE00"}}}')

    assert reply.observation == {"a": "\ufffd [5]", "b": "\U0001f600"}


def test_a_state_is_returned_as_it_is() -> None:
    assert parse_state(frame("state", step_count=3)) == {"step_count": 3}
    with pytest.raises(ProtocolError):
        parse_state(frame(observation={}))


# Error replies


@pytest.mark.parametrize(("active", "maximum"), [(4, 4), (None, None)])
def test_a_full_server_is_recognised_with_its_numbers(active: int | None, maximum: int | None) -> None:
    """S01."""
    with pytest.raises(ServerFullError) as caught:
        parse_observation(
            frame("error", message="full", code="CAPACITY_REACHED", active_sessions=active, max_sessions=maximum)
        )
    assert (caught.value.active, caught.value.maximum, caught.value.code) == (active, maximum, "CAPACITY_REACHED")


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR"])
def test_errors_that_end_the_session_are_losses(code: str) -> None:
    with pytest.raises(SessionFailedError, match="boom") as caught:
        parse_observation(frame("error", message="boom", code=code))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("code", "maybe_applied"),
    [
        ("INVALID_JSON", False),
        ("UNKNOWN_TYPE", False),
        ("VALIDATION_ERROR", False),
        ("EXECUTION_ERROR", True),
        (None, True),
    ],
)
def test_other_errors_leave_the_session_and_say_whether_the_environment_was_reached(
    code: str | None, maybe_applied: bool
) -> None:
    with pytest.raises(EnvironmentFailedError, match="boom") as caught:
        parse_state(frame("error", message="boom", code=code))
    assert (caught.value.code, caught.value.maybe_applied) == (code, maybe_applied)


def test_a_validation_reply_is_kept_and_its_fields_are_named() -> None:
    bad = {"loc": ["data", "message"], "msg": "Field required", "type": "missing"}

    with pytest.raises(EnvironmentFailedError, match=r"\(data\.message: Field required\)") as caught:
        parse_observation(frame("error", message="Invalid message", code="VALIDATION_ERROR", errors=[bad, "odd"]))
    assert caught.value.errors == [bad]


def test_a_message_without_a_request_is_a_refusal_or_a_breach() -> None:
    assert isinstance(parse_unasked(frame("error", code="CAPACITY_REACHED")), ServerFullError)
    assert isinstance(parse_unasked(frame("error", code="SESSION_ERROR")), SessionFailedError)
    for text in (frame(observation={}), frame("error", code="EXECUTION_ERROR"), "garbage", b""):
        assert isinstance(parse_unasked(text), ProtocolError)


any_text = st.text(st.characters())  # half characters as well
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=10,
)
near_replies = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["observation", "state", "error"]) | json_values,
        "data": st.fixed_dictionaries(
            {},
            optional={
                "observation": st.dictionaries(any_text, json_values) | json_values,
                "reward": st.floats() | st.integers() | json_values,
                "done": st.booleans() | json_values,
                "metadata": st.dictionaries(any_text, json_values) | json_values,
                "code": st.sampled_from(["CAPACITY_REACHED", "SESSION_ERROR", "VALIDATION_ERROR"]) | json_values,
                "message": json_values,
                "errors": st.lists(st.fixed_dictionaries({}, optional={"loc": json_values, "msg": json_values}))
                | json_values,
                "active_sessions": json_values,
            },
        )
        | json_values,
    }
).map(json.dumps)
frames = st.text() | st.binary() | json_values.map(json.dumps) | near_replies


def assert_it_can_be_sent_on(result: object) -> None:
    """It is JSON in the strict sense, in UTF-8, and shallow enough for code that walks through it by recursion."""
    json.dumps(result, ensure_ascii=False, allow_nan=False).encode()
    copy.deepcopy(result)


@given(frames)
def test_whatever_arrives_is_a_sound_result_or_one_of_our_errors(text: str | bytes) -> None:
    with contextlib.suppress(OpenEnvError):
        observation = parse_observation(text)
        assert_it_can_be_sent_on(observation)
        assert observation.reward is None or math.isfinite(observation.reward)
        assert isinstance(observation.done, bool)
    with contextlib.suppress(OpenEnvError):
        assert_it_can_be_sent_on(parse_state(text))


@given(frames)
def test_whatever_arrives_unasked_is_an_error_whose_text_is_bounded(text: str | bytes) -> None:
    error = parse_unasked(text)
    assert isinstance(error, (ProtocolError, ServerFullError, SessionFailedError))
    assert len(str(error)) < 5000


python_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers().map(lambda power: 10 ** min(abs(power), 10_000))
    | st.floats()
    | st.complex_numbers()
    | any_text
    | st.binary()
    | st.builds(object),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.sets(st.integers())
        | st.dictionaries(any_text | st.integers() | st.floats() | st.none() | st.tuples(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(python_values)
def test_any_value_is_sent_as_json_or_refused(value: Any) -> None:
    with contextlib.suppress(RequestError):
        text = encode_step({"action": value})
        text.encode()
        assert set(json.loads(text)["data"]) == {"action"}
    with contextlib.suppress(RequestError):
        json.loads(encode_reset(value))


sound_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), sound_values, max_size=3))
def test_what_is_json_arrives_as_it_was(action: dict[str, Any]) -> None:
    assert json.loads(encode_step(action)) == {"type": "step", "data": action}


@pytest.mark.parametrize("depth", [50, 990, 100_000])
def test_what_cannot_be_sent_is_refused_however_deep_it_is(depth: int) -> None:
    value: Any = object()
    for _ in range(depth):
        value = [value]
    for action in (value, {"action": value}):
        with pytest.raises(RequestError):
            encode_step(action)


def test_a_reply_may_be_nested_a_hundred_levels_deep() -> None:
    """Whatever the version of Python and the depth of the stack."""

    def nested(levels: int) -> str:
        return frame(observation={"x": 1}).replace("1}}", "[" * levels + "]" * levels + "}}")

    assert_it_can_be_sent_on(parse_observation(nested(98)))
    with pytest.raises(ProtocolError, match="nested more than 100 levels deep"):
        parse_observation(nested(99))


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"observation","data":{"observation":{"x":NaN}}}',
        '{"type":"observation","data":{"observation":{"x":[-Infinity]}}}',
        '{"type":"observation","data":{"observation":{"x":1e999}}}',
        '{"type":"observation","data":{"observation":{},"reward":0,"reward":1}}',
        '{"type":"observation","type":"error","data":{"observation":{}}}',
        r'{"type":"observation","data":{"observation":{"\ud800":1,"\ud801":2}}}',
    ],
)
def test_what_python_reads_but_json_does_not_allow_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="not JSON"):
        parse_observation(text)


secret_texts = st.text(min_size=1, max_size=8).map(lambda text: f"hunter2{text}hunter2")
addresses = st.builds(
    "{}{}{}{}{}{}".format,
    st.sampled_from(["", "http://", "https://", "ws://", "wss://", "HTTP://", "ftp://", "//", ":"]),
    st.just("") | st.builds("{}:{}@".format, st.text(max_size=3), secret_texts | secret_texts.map(quote)),
    st.sampled_from(["h", "h.example", "[::1]", "127.0.0.1", "", "[", "ß.example", "."]) | st.text(max_size=5),
    st.sampled_from(["", ":1", ":0", ":", ":99999", ":x"]),
    st.text(max_size=5).map("/{}".format) | st.sampled_from(["", "/ws", "//a//ws/"]),
    st.just("") | secret_texts.map("?token={}".format) | secret_texts.map("#{}".format),
)


@given(st.text() | addresses)
def test_any_text_is_an_address_or_refused_and_no_secret_is_shown(text: str) -> None:
    """U05."""
    try:
        url = protocol.websocket_url(text)
    except ConfigurationError as error:
        shown = str(error)
    else:
        assert protocol.websocket_url(url) == url
        assert parse_uri(url).resource_name.isprintable()  # websockets takes it, and it does not break the handshake
        protocol.is_loopback(url)
        shown = protocol.public_url(url)
        assert not {"@", "?"} & set(shown)
    assert "hunter2" not in shown
    assert len(shown) < 1000
