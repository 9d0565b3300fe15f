"""What all TextArena games share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from openenv_client import StepResult
from openenv_client.testing import MockEnvServer, reply
from schedulers import RolloutError, RolloutOutput, StopReason, TextArenaGame, TextArenaScheduler, multi_turns
from schedulers.engines import ScriptedEngine
from schedulers.textarena import observation_text


def news(*messages: str, prompt: str = "") -> dict[str, Any]:
    """An observation as our server sends it: what is new, the player's own text among it."""
    return {
        "prompt": prompt,
        "messages": [
            {"sender_id": 0 if text.startswith("[") else -1, "content": text, "category": ""} for text in messages
        ],
    }


def history(*messages: str) -> dict[str, Any]:
    """An observation as other servers send it: one message that grows."""
    return news("\n".join(["", *messages]), prompt="GuessTheNumber-v0")


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (news("Guess.", "1 to 9"), "Guess.\n1 to 9"),
        (news("[5]", "Higher."), "Higher."),
        (news("[5]"), ""),
        ({"prompt": "Guess."}, "Guess."),
        ({"prompt": "Guess.", "messages": None}, "Guess."),
        ({"messages": [{"content": "no sender"}]}, "no sender"),
        ({}, ""),
    ],
)
def test_text_of_an_observation(observation: dict[str, Any], text: str) -> None:
    assert observation_text(observation) == text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("[5]", {"message": "[5]"}),
        ("first [4], no, [up down]!", {"message": "[up down]"}),
        ("<think>[4]</think>[5]", {"message": "[5]"}),
        ("[5]<think>or [4]?</think>", {"message": "[5]"}),
        ("five", None),
        ("[]", None),
        ("[5\n]", None),
        ("", None),
        ("<think>[4]", None),
    ],
)
def test_last_bracketed_text_is_the_move(text: str, action: dict[str, Any] | None) -> None:
    """P01: the last mention outside thinking wins."""
    assert TextArenaScheduler().parse_action(text) == action


def test_model_reads_what_is_new_from_a_server_that_repeats_everything() -> None:
    """L13: each turn adds its own text only."""
    game = TextArenaGame(history("Guess."))
    assert game.prompt() == "\nGuess."
    game.record("[5]", {}, StepResult(history("Guess.", "[Player] [5]", "Higher."), 0.0, False, {}))
    assert game.prompt() == "[Player] [5]\nHigher."
    game.record("[7]", {}, StepResult(history("Guess.", "[Player] [5]", "Higher.", "Lower."), 0.5, False, {}))
    assert game.prompt() == "Lower."
    assert game.rewards() == {"environment_reward": 0.5}


@pytest.mark.parametrize("first", ["", "Higher.", "Guess."])
def test_model_reads_all_from_a_server_that_sends_what_is_new(first: str) -> None:
    """Also when that is what it said before, or when it began with nothing."""
    game = TextArenaGame(news(first))
    for text in ("Higher.", "Higher.", "Higher. Much!", "Lower."):
        game.record("[5]", {}, StepResult(news("[5]", text), 0.0, False, {}))
        assert text.endswith(game.prompt())
        assert game.prompt()


def number_game(kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    """Guess 7; every wrong guess costs a quarter."""
    action = yield reply(news("Guess.", prompt="Guess."), reward=0.0)
    while action["message"] != "[7]":
        action = yield reply(news(action["message"], "Wrong."), reward=-0.25)
    yield reply(news(action["message"], "Right."), reward=1.0, done=True)


async def play(answers: list[str], **options: Any) -> RolloutOutput:
    with MockEnvServer(number_game) as server:
        async with TextArenaScheduler(ScriptedEngine(answers), base_url=server.base_url, **options) as scheduler:
            [output] = await scheduler.async_infer([{}])
        server.wait_until(lambda: server.sessions == 0)
        return output


async def test_game_from_start_to_end() -> None:
    output = await play(["I try [5]", "hmm", "[7]"])
    assert [message["content"] for message in output.messages] == [
        "Guess.",
        "I try [5]",
        "Wrong.",
        "hmm",
        "No move was found in that answer. Answer with one move in square brackets.",
        "[7]",
    ]
    infos = output.rollout_infos
    assert infos["stop_reason"] == "env_done"
    assert infos["step_rewards"] == [-0.25, 0.0, 1.0]
    assert infos["rewards"] == {"environment_reward": 0.75}
    assert infos["environment_reward"] == infos["total_reward"] == 0.75


async def test_weights_scale_the_components() -> None:
    """The components are recorded as they are; steps and total are weighted, and still agree."""
    output = await play(["[5]", "[7]"], reward_weights={"environment_reward": 2.0})
    assert output.rollout_infos["step_rewards"] == [-0.5, 2.0]
    assert output.total_reward == 1.5
    assert output.rollout_infos["rewards"] == {"environment_reward": 0.75}


async def test_two_answers_without_a_move_end_the_game() -> None:
    assert (await play(["hm", "hmm"])).stop_reason is StopReason.PARSE_ERROR


class Patient(TextArenaGame):
    system_prompt = "Rules."
    reminder = "Brackets!"
    reward_names = ("a", "b")

    @property
    def max_turns(self) -> int:
        return 2

    def rewards(self) -> dict[str, float]:
        return {"a": 1.0, "b": 2.0}


class PatientScheduler(TextArenaScheduler):
    game_class = Patient


@pytest.mark.parametrize(("max_turns", "turns"), [(None, 2), (3, 3), (1, 1)])
async def test_scheduler_limits_turns_or_leaves_it_to_the_game(max_turns: int | None, turns: int) -> None:
    with MockEnvServer(number_game) as server:
        engine = ScriptedEngine(lambda request, turn: "[1]")
        async with PatientScheduler(engine, max_turns, base_url=server.base_url) as scheduler:
            [output] = await scheduler.async_infer([{}])
    assert output.rollout_infos["num_turns"] == turns
    assert output.messages[0] == {"role": "system", "content": "Rules."}
    assert output.rollout_infos["step_rewards"] == [3.0] + [0.0] * (turns - 1)


def test_system_message_replaces_the_games() -> None:
    assert PatientScheduler(system_message="Other rules.").system_message == "Other rules."


async def test_component_that_is_not_listed_is_an_error() -> None:
    class Loose(TextArenaGame):
        def rewards(self) -> dict[str, float]:
            return {"luck": 1.0}

    class LooseScheduler(TextArenaScheduler):
        game_class = Loose

    with MockEnvServer([reply(news("Guess."))]) as server:
        async with LooseScheduler(ScriptedEngine(["[1]"])) as scheduler:
            with pytest.raises(
                RolloutError, match=r"Loose.rewards\(\) gives \['luck'\], which reward_names does not list"
            ):
                await scheduler.async_infer([{"env_config": {"base_url": server.base_url}}])


def test_weights_of_unknown_components_are_refused() -> None:
    with pytest.raises(ValueError, match="no reward component is called 'aa'; did you mean 'a'"):
        PatientScheduler(reward_weights={"aa": 1.0})
    with pytest.raises(ValueError, match="no reward component is called 'xyz'; there are a, b"):
        PatientScheduler(reward_weights={"xyz": 1.0})


def test_scheduler_is_registered() -> None:
    assert multi_turns["textarena_scheduler"] is TextArenaScheduler
