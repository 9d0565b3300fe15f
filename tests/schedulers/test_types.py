"""Requests and how to sample them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedulers.types import RequestConfig, RolloutInferRequest, RolloutOutput, StopReason


def test_row_becomes_a_request() -> None:
    """Columns that a request has no field for are kept in data_dict."""
    row = {
        "messages": [{"role": "user", "content": "Play"}],
        "env_config": {"reset_kwargs": {"seed": 3}},
        "data_dict": {"solution": "42"},
        "uuid": 7,
    }
    request = RolloutInferRequest.from_row(row)
    assert request.messages == [{"role": "user", "content": "Play"}]
    assert request.data_dict == {"solution": "42", "env_config": {"reset_kwargs": {"seed": 3}}}
    assert request.uuid == "7"


def test_requests_of_one_row_share_nothing() -> None:
    """A trainer repeats a row for the members of a group; what one plays must not show in another."""
    row = {"messages": [{"role": "user", "content": "Play"}]}
    first, second = RolloutInferRequest.from_row(row), RolloutInferRequest.from_row(row)
    first.messages[0]["content"] = "changed"
    first.messages.append({"role": "assistant", "content": "a"})
    assert second.messages == row["messages"] == [{"role": "user", "content": "Play"}]
    assert first.uuid != second.uuid


@pytest.mark.parametrize("row", [{}, {"messages": None}, {"messages": []}])
def test_row_without_messages(row: dict[str, Any]) -> None:
    assert RolloutInferRequest.from_row(row).messages == []


def test_row_with_a_text_instead_of_messages_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a list of .*, not"):
        RolloutInferRequest.from_row({"messages": "Play"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1 .*, not 0"),
        ({"temperature": -0.1}, "temperature .*, not -0.1"),
        ({"top_p": 0}, "top_p .*, not 0"),
        ({"top_p": 1.5}, "top_p .*, not 1.5"),
        ({"top_k": -1}, "top_k .*, not -1"),
    ],
)
def test_impossible_sampling_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestConfig(**options)


def test_output_shows_what_its_infos_say() -> None:
    infos = {"stop_reason": "max_turns", "total_reward": 1.5, "error": None}
    output = RolloutOutput(response=None, messages=[], rollout_infos=infos)
    assert output.stop_reason is StopReason.MAX_TURNS
    assert output.total_reward == 1.5
    assert output.error is None


def test_stop_reason_prints_as_its_value() -> None:
    assert f"{StopReason.ENV_DONE}" == "env_done"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("Play", "a request must be a RolloutInferRequest or a row with 'messages', not 'Play'"),
        (None, "not None"),
        ({"messages": ["Play"]}, "'messages' of a row must be a list of"),
        (
            {"env_config": "http://127.0.0.1:8000"},
            "'env_config' of a row must be a mapping, not a str",
        ),
    ],
)
def test_what_is_no_row_is_refused_by_its_value(row: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        RolloutInferRequest.from_row(row)
