"""What holds for every game: the object that the scripts read, and a player that shows that it can be won."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from examples.example import Example
from examples.registry import EXAMPLES
from schedulers import RolloutInferRequest, StopReason, multi_turns
from schedulers.commands.names import policies_of
from schedulers.engines import ScriptedEngine
from server_scripts.launch import ServerProcess

GAMES = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


@GAMES
def test_training_seeds_are_not_held_out(example: Example) -> None:
    rows = [json.loads(line) for line in example.dataset.read_text().splitlines()]
    assert rows == [example.row(seed) for seed in range(len(rows))]
    assert len(rows) < example.held_out_seed


@GAMES
async def test_reference_player_wins_every_held_out_game(
    example: Example, environment_server: Callable[..., ServerProcess]
) -> None:
    """From nothing but what a model sees, within the game's own turn limit; every game reports ``solved``."""
    base_url = ""
    if example.env_id is not None:
        base_url = environment_server(env_id=example.env_id, max_concurrent_envs=16).base_url
    seeds = range(example.held_out_seed, example.held_out_seed + 64)
    async with example.scheduler(ScriptedEngine(example.policy), None) as scheduler:
        outputs = await scheduler.async_infer([example.row(seed, base_url=base_url) for seed in seeds])
    assert [output.error for output in outputs] == [None] * 64
    assert [output.rollout_infos["solved"] for output in outputs] == [True] * 64
    assert {tuple(output.rollout_infos["rewards"]) for output in outputs} == {example.reward_names}
    assert len({str(output.messages) for output in outputs}) > 8, "seeds make different games"


@GAMES
async def test_random_player_plays_legal_moves_and_the_same_game_again(
    example: Example, environment_server: Callable[..., ServerProcess]
) -> None:
    """Whatever else is played beside it."""
    base_url = ""
    if example.env_id is not None:
        base_url = environment_server(env_id=example.env_id, max_concurrent_envs=16).base_url
    rows = [example.row(seed, base_url=base_url) for seed in range(16)]
    async with example.scheduler(ScriptedEngine(example.policies["random"]), None) as scheduler:
        outputs = await scheduler.async_infer(rows)
        again = await scheduler.async_infer(rows[:4])
    assert [output.error for output in outputs] == [None] * 16
    assert [output.messages for output in again] == [output.messages for output in outputs[:4]]
    assert StopReason.PARSE_ERROR not in {output.stop_reason for output in outputs}
    assert len({str(output.messages) for output in outputs}) > 8, "games differ"


@GAMES
def test_players_are_found_by_name(example: Example) -> None:
    """They are those of the scheduler, which has a name as well, or of its environment."""
    assert {"random", "solver"} <= set(example.policies)
    assert policies_of(example.scheduler, example.row(0)["env_config"]["name"]) == example.policies
    assert example.scheduler in multi_turns.values()


@GAMES
def test_players_say_what_they_do_not_understand(example: Example) -> None:
    request = RolloutInferRequest(messages=[{"role": "user", "content": "Good morning."}])
    policies = [example.policy] if example.name == "maths" else example.policies.values()
    for policy in policies:
        with pytest.raises(ValueError, match=r"Good morning\."):
            policy(request, 0)


@GAMES
def test_names(example: Example) -> None:
    assert EXAMPLES[example.name] is example
    assert example.dataset.is_file()
