from __future__ import annotations

import json
from typing import Any

import pytest

from openenv_client.testing.frames import error_frame, read_request


@pytest.mark.parametrize(
    ("message", "kind", "code"),
    [
        ("garbage", "garbage", "INVALID_JSON"),
        (b"\xff\x00", "garbage", "INVALID_JSON"),
        ("[" * 100_000, "garbage", "INVALID_JSON"),
        ([1], "None", "UNKNOWN_TYPE"),
        ({"type": "dance"}, "dance", "UNKNOWN_TYPE"),
        ({"type": ["step"]}, "['step']", "UNKNOWN_TYPE"),
        ({"type": "step", "data": {}, "request_id": 1}, "step", "VALIDATION_ERROR"),
        ({"type": "state", "data": {}}, "state", "VALIDATION_ERROR"),
        ({"type": "step", "data": "x"}, "step", "VALIDATION_ERROR"),
    ],
)
def test_what_is_no_request_gets_the_error_that_a_real_server_gives(message: Any, kind: str, code: str) -> None:
    text = message if isinstance(message, (str, bytes)) else json.dumps(message)
    told, data, complaint = read_request(text)
    assert (told, data) == (kind, {"text": text})
    assert complaint is not None
    assert json.loads(complaint)["data"]["code"] == code


def test_a_request_is_its_type_and_its_data() -> None:
    assert read_request('{"type":"step","data":{"a":1}}') == ("step", {"a": 1}, None)
    assert read_request('{"type":"state"}') == ("state", {}, None)


def test_an_error_has_a_code_a_message_and_what_else_is_given() -> None:
    data = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 1}
    assert json.loads(error_frame("CAPACITY_REACHED", "full", max_sessions=1)) == {"type": "error", "data": data}
