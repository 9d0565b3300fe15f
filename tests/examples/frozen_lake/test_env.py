"""FrozenLake as GYMScheduler plays it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.frozen_lake.env import NAME, REMINDER, SYSTEM_PROMPT, FrozenLakeEnv, LakeSettings, parse_direction
from examples.frozen_lake.example import EXAMPLE
from examples.frozen_lake.lake import DIRECTIONS
from examples.frozen_lake.policies import perfect
from schedulers import GYMScheduler, RolloutOutput, StopReason, envs
from schedulers.engines import ScriptedEngine

SEED = 5
FIRST = "P F F H\nF H F F\nH F H G\nF F F F"
WAY = ["right", "right", "down", "right", "down"]


async def play(*answers: str, turn_limit: int | None = None, **env_config: Any) -> RolloutOutput:
    scheduler = GYMScheduler(ScriptedEngine(answers), turn_limit, gym_env=NAME)
    row = {"env_config": {"seed": SEED, **env_config}}
    [output] = await scheduler.async_infer([row])
    return output


def say(*steps: str) -> list[str]:
    return [f"<action>{step}</action>" for step in steps]


async def test_conversation() -> None:
    """The model reads the rules, then the map; the environment is the one registered by its name."""
    output = await play(*say(*WAY))
    assert envs["frozen_lake"] is FrozenLakeEnv
    assert output.messages[:2] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": FIRST},
    ]
    assert output.messages[3]["content"] == "S P F H\nF H F F\nH F H G\nF F F F"


async def test_goal_pays_one() -> None:
    output = await play(*say(*WAY))
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.rollout_infos["step_rewards"] == [0, 0, 0, 0, 1]
    assert output.rollout_infos["solved"] is True
    assert output.rollout_infos["status"] == "goal"
    assert output.rollout_infos["shortest_path"] == 5
    assert output.rollout_infos["seed"] == SEED
    assert output.rollout_infos["final_observation"].startswith("You reached the goal.\n")


async def test_hole_ends_it_without_reward() -> None:
    output = await play(*say("right", "down"))
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.total_reward == 0
    assert output.rollout_infos["solved"] is False
    assert output.rollout_infos["status"] == "hole"
    assert output.rollout_infos["final_observation"].startswith("You fell into a hole.\n")


async def test_step_off_the_map_stays() -> None:
    output = await play(*say("up", *WAY))
    assert output.messages[3]["content"] == f"That is off the map; you stay where you are.\n{FIRST}"
    assert output.total_reward == 1


async def test_answer_without_a_step_gets_the_format_again() -> None:
    """One is forgiven as often as a step comes between; the player does not move."""
    output = await play("Hm.", *say("right"), "Hm.", *say(*WAY[1:]))
    assert output.messages[3]["content"] == f"{REMINDER}\n{FIRST}"
    assert output.rollout_infos["solved"] is True


async def test_two_answers_in_a_row_without_a_step_end_it() -> None:
    output = await play(*say("right"), "Hm.", "<action>jump</action>")
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.rollout_infos["num_turns"] == 3
    assert output.rollout_infos["status"] == "no_step"
    assert output.total_reward == 0


@pytest.mark.parametrize(("env_config", "turns"), [({}, 16), ({"max_turns": 3}, 3), ({"max_turns": None}, 16)])
async def test_lake_has_a_turn_limit_of_its_own(env_config: dict[str, Any], turns: int) -> None:
    """A player that goes nowhere is stopped without a limit of the scheduler."""
    output = await play(*say(*["up"] * 20), **env_config)
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.rollout_infos["num_turns"] == turns


async def test_limit_of_the_scheduler_holds_too() -> None:
    output = await play(*say(*["up"] * 20), turn_limit=2)
    assert output.stop_reason is StopReason.MAX_TURNS


async def test_last_turn_can_win() -> None:
    output = await play(*say(*WAY), turn_limit=5)
    assert output.rollout_infos["solved"] is True


@pytest.mark.parametrize(
    ("steps", "turns", "rewards"),
    [
        (WAY, 5, [0.1, 0.1, 0.1, 0.1, 1.1]),
        (["right", "left", "up", *WAY], 9, [0.1, -0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 1.1]),
        (["right", "right", "right"], 9, [0.1, 0.1, -0.2]),
        (["down", "down"], 9, [-0.1, 0.1]),
        (["right", "right", "left"], 3, [0.1, 0.1, -0.2]),
        (["right", "", ""], 9, [0.1, 0.0, -0.1]),
    ],
    ids=["goal", "there and back", "hole", "hole behind", "out of turns", "no step"],
)
async def test_progress_is_paid_by_its_weight_and_taken_back_from_a_lost_game(
    steps: list[str], turns: int, rewards: list[float]
) -> None:
    """The start is five steps from the goal, so each step nearer is worth a fifth of the weight."""
    output = await play(*say(*steps), progress_weight=0.5, max_turns=turns)
    assert output.rollout_infos["step_rewards"] == pytest.approx(rewards)


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({"seed": -1}, "seed must be a whole number from 0, not -1"),
        ({"seed": "7"}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"size": 1}, "size must be a whole number from 2 to 20, not 1"),
        ({"size": 21}, "size must be"),
        ({"size": 4.5}, "size must be"),
        ({"p": 1.5}, "p must be a number from 0 to 1, not 1.5"),
        ({"p": float("nan")}, "p must be"),
        ({"p": "much"}, "p must be"),
        ({"max_turns": 0}, "max_turns must be a whole number from 1, not 0"),
        ({"progress_weight": -1}, "progress_weight must be a number from 0, not -1"),
        ({"progress_weight": float("inf")}, "progress_weight must be"),
        ({"sise": 5}, "no setting 'sise'; did you mean 'size'"),
        ({"wind": 5}, "no setting 'wind'; there are seed, size, p, max_turns, progress_weight"),
    ],
)
def test_bad_settings_are_refused_by_name(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrozenLakeEnv(env_config)


def test_settings() -> None:
    """What a table of several environments leaves empty is not given; what the scheduler reads is left to it."""
    assert LakeSettings.from_config({"name": "frozen_lake", "base_url": None, "system_message": "", "size": 6}) == (
        LakeSettings(size=6)
    )
    assert len(FrozenLakeEnv({"size": 6, "p": 1}).lake.rows) == 6


def test_without_a_seed_every_lake_is_new() -> None:
    assert len({FrozenLakeEnv({}).lake for _ in range(20)}) > 15


async def test_group_walks_over_one_lake() -> None:
    """S14: the members' fingerprints are alike, those of other seeds are not."""
    rows = [EXAMPLE.row(seed) for seed in (3, 3, 4)]
    outputs = await GYMScheduler(ScriptedEngine(perfect)).async_infer(rows)
    first, second, other = (output.rollout_infos["fingerprint"] for output in outputs)
    assert first == second != other


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("<action>up</action>", "up"),
        ("<ACTION> Down\n</Action>", "down"),
        ("not <action>up</action> but <action>left</action>.", "left"),
        ("<think><action>up</action></think><action>right</action>", "right"),
        ("<action>up</action><think><action>down</action></think>", "up"),
        ("<think><action>up</action>", None),
        ("<action>up</action> or <action>jump</action>", None),
        ("<action>up", None),
        ("<action></action>", None),
        ("up", None),
        ("", None),
    ],
)
def test_the_last_action_outside_thinking_counts(text: str, direction: str | None) -> None:
    assert parse_direction(text) == direction


def test_examples_shown_to_the_model_parse() -> None:
    """P04."""
    assert parse_direction(SYSTEM_PROMPT) == parse_direction(REMINDER) == "up"


@given(st.text(), st.sampled_from(sorted(DIRECTIONS)))
def test_a_closing_action_is_taken_whatever_stands_before(before: str, direction: str) -> None:
    assert parse_direction(f"{before}</think><action>{direction}</action>") == direction


@given(st.text(alphabet="<>/actionthkup ", max_size=60))
def test_no_text_raises(text: str) -> None:
    assert parse_direction(text) in {None, *DIRECTIONS}


async def test_random_player_is_paid_for_nothing_but_the_goal() -> None:
    """256 walks of a player that sees nothing: some arrive, and the others get nothing."""
    rng = random.Random(0)
    engine = ScriptedEngine(lambda request, turn: f"<action>{rng.choice(sorted(DIRECTIONS))}</action>")
    outputs = await GYMScheduler(engine).async_infer([EXAMPLE.row(seed) for seed in range(256)])
    solved = [output.rollout_infos["solved"] for output in outputs]
    assert [output.total_reward for output in outputs] == [float(won) for won in solved]
    assert 0 < sum(solved) < 256
