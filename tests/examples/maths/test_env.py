"""A question, one or several attempts, and what they are worth."""

from __future__ import annotations

from typing import Any

import pytest

from examples.maths.env import SYSTEM_PROMPT, MathEnv
from schedulers import GYMScheduler, RolloutError, RolloutOutput, StopReason, envs
from schedulers.engines import ScriptedEngine


async def play(script: list[str], **env_config: Any) -> RolloutOutput:
    row = {"env_config": {"name": "math", "question": "What is 1/2 + 1/4?", "answer": "\\frac{3}{4}", **env_config}}
    [output] = await GYMScheduler(ScriptedEngine(script)).async_infer([row])
    return output


def test_registered_by_its_name() -> None:
    assert envs["math"] is MathEnv


async def test_right_answer_is_worth_one() -> None:
    output = await play(["<think>\\boxed{1}</think>It is \\boxed{0.75}."])
    assert [message["role"] for message in output.messages] == ["system", "user", "assistant"]
    assert output.messages[0]["content"] == SYSTEM_PROMPT
    assert output.messages[1]["content"] == "What is 1/2 + 1/4?"
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.total_reward == 1.0
    assert output.rollout_infos["solved"] is True


async def test_wrong_answer_ends_it_without_a_reward() -> None:
    output = await play(["\\boxed{1/6}"])
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.total_reward == 0.0
    assert output.rollout_infos["solved"] is False
    assert output.rollout_infos["final_observation"] == "That is not correct."


async def test_attempts_come_with_feedback() -> None:
    output = await play(["\\boxed{1/6}", "I do not know", "\\boxed{3/4}"], attempts=4)
    feedback = [message["content"] for message in output.messages if message["role"] == "user"][1:]
    assert feedback == [
        "That is not correct. Find the mistake and answer again in \\boxed{}; attempts left: 3.",
        "That is not correct. Find the mistake and answer again in \\boxed{}; attempts left: 2.",
    ]
    assert output.rollout_infos["step_rewards"] == [0.0, 0.0, 1.0]
    assert output.rollout_infos["solved"] is True


async def test_attempts_are_limited() -> None:
    output = await play(["\\boxed{1}"] * 3, attempts=2)
    assert output.rollout_infos["num_turns"] == 2
    assert output.total_reward == 0.0


async def test_system_message_and_numbers_of_a_row() -> None:
    """An answer may be a number; settings that are None count as not given, as datasets with many columns have them."""
    output = await play(["7"], question="3 + 4?", answer=7, attempts=None, system_message="Be brief.")
    assert output.messages[0]["content"] == "Be brief."
    assert output.total_reward == 1.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"question": None}, "question must be a text"),
        ({"question": " "}, "question must be a text"),
        ({"answer": ["7"]}, r"answer must be a text \(an answer may be a number\), not \['7'\]"),
        ({"answer": ""}, "answer must be a text"),
        ({"attempts": 0}, "attempts must be a whole number from 1, not 0"),
        ({"attempts": True}, "attempts must be a whole number from 1, not True"),
        ({"atempts": 2}, "no setting 'atempts'; did you mean 'attempts'"),
    ],
)
async def test_wrong_setting_is_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        await play(["7"], **setting)
