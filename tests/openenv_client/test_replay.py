"""What of an answer is compared when a game is played again."""

from __future__ import annotations

from typing import Any

import pytest

from openenv_client import EnvironmentFailedError
from openenv_client.protocol import Observation
from openenv_client.replay import Outcome

SAME = {"done": False, "metadata": {}}


def outcome(observation: dict[str, Any] | None = None, reward: float | None = 0.5, **rest: Any) -> Outcome:
    return Outcome.of(Observation({"a": [1, 2]} if observation is None else observation, reward, **{**SAME, **rest}))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (outcome(), []),
        (outcome(metadata={"time": 1}), []),
        (outcome(reward=None), ["reward"]),
        (outcome(reward=0.25, done=True), ["done", "reward"]),
        (outcome({"a": [2, 1]}), ["observation['a']"]),
        (outcome({"a": [1, 2], "b": None}), ["observation['b']"]),
        (outcome({}), ["observation['a']"]),
    ],
)
def test_every_part_but_the_metadata_counts(other: Outcome, names: list[str]) -> None:
    """One that is missing is not one that is None."""
    assert outcome().differences(other) == other.differences(outcome()) == names


def test_the_order_of_keys_does_not_matter() -> None:
    assert outcome({"a": {"x": 1, "y": 2}}).differences(outcome({"a": {"y": 2, "x": 1}})) == []


def test_an_error_is_compared_by_its_message() -> None:
    failed = Outcome.of(EnvironmentFailedError("no such cell"))
    assert failed.differences(Outcome.of(EnvironmentFailedError("no such cell"))) == []
    assert failed.differences(Outcome.of(EnvironmentFailedError("no such row"))) == ["error"]
    assert "error" in failed.differences(outcome())
