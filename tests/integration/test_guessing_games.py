"""GuessTheNumber and Mastermind on our server: what is hidden stays hidden, seeds hold, and only winning pays."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from examples.example import Example
from examples.registry import EXAMPLES
from openenv_client import OpenEnvWrapper
from schedulers import RolloutInferRequest, RolloutOutput, StopReason
from schedulers.engines import ScriptedEngine
from server_scripts.launch import ServerProcess

HELD_OUT = 1_000_000


@pytest.fixture(params=["guess_the_number", "mastermind"])
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


@pytest.fixture
def server(example: Example, environment_server: Callable[..., ServerProcess]) -> ServerProcess:
    return environment_server(env_id=example.env_id, max_concurrent_envs=16)


async def play(example: Example, server: ServerProcess, script: Any, seeds: Any) -> list[RolloutOutput]:
    """Play, and see that every session is gone."""
    rows = [example.row(seed, base_url=server.base_url) for seed in seeds]
    async with example.scheduler(ScriptedEngine(script), None) as scheduler:
        outputs = await scheduler.async_infer(rows)
    await asyncio.to_thread(server.wait_until_idle)
    assert [output.error for output in outputs] == [None] * len(rows)
    return outputs


def some_guess(example: Example, chance: random.Random) -> str:
    if example.name == "mastermind":
        return "[{} {} {} {}]".format(*chance.sample(range(1, 7), 4))
    return f"[{chance.randint(1, 20)}]"


async def test_random_player_is_not_paid_for_losing(example: Example, server: ServerProcess) -> None:
    """Some of 64 games are won by luck and pay; the rest, whatever TextArena pays for coming near, do not."""

    def lucky(request: RolloutInferRequest, turn: int) -> str:
        seed = request.data_dict["env_config"]["reset_kwargs"]["seed"]
        return some_guess(example, random.Random(f"{seed}, {turn}"))

    outputs = await play(example, server, lucky, range(64))
    won = [output for output in outputs if output.rollout_infos["solved"]]
    lost = [output for output in outputs if not output.rollout_infos["solved"]]
    assert all((output.total_reward or 0) > 0 for output in won)
    assert all(output.total_reward is not None and output.total_reward <= 0 for output in lost)
    assert any(output.rollout_infos["environment_reward"] > 0 for output in lost), "TextArena does pay for it"
    for output in outputs:
        assert sum(output.rollout_infos["step_rewards"]) == pytest.approx(sum(output.rollout_infos["rewards"].values()))


@pytest.mark.parametrize(
    ("answers", "reason", "turns"),
    [
        (["Hm.", "Hm."], StopReason.PARSE_ERROR, 2),
        (["GUESS", "Hm.", "<think>GUESS", "no"], StopReason.PARSE_ERROR, 3),
        (["GUESS", "GUESS", "GUESS"], StopReason.ENV_DONE, 3),
        (["[99 99]\n[99]", "[99 99]\n[99]"], StopReason.ENV_DONE, 2),
    ],
    ids=["nothing", "thoughts", "repetition", "out of range"],
)
async def test_bad_answers(
    example: Example, server: ServerProcess, answers: list[str], reason: StopReason, turns: int
) -> None:
    """Two unparsable answers in a row, or two that the environment refuses, lose; and that costs."""
    guess = some_guess(example, random.Random(1))
    [output] = await play(example, server, [answer.replace("GUESS", guess) for answer in answers], [HELD_OUT])
    assert output.stop_reason is reason
    assert output.rollout_infos["num_turns"] == turns
    assert output.rollout_infos["solved"] is False
    assert output.total_reward is not None
    assert output.total_reward < 0


async def test_group_plays_one_game(example: Example, server: ServerProcess) -> None:
    """S12, S14: the same guesses get the same answers in all eight games of a seed, and other ones in other seeds."""

    def script(request: RolloutInferRequest, turn: int) -> str:
        return some_guess(example, random.Random(turn))

    outputs = await play(example, server, script, [seed for seed in range(12) for _ in range(8)])
    groups = [outputs[start : start + 8] for start in range(0, len(outputs), 8)]
    for group in groups:
        assert all(output.messages == group[0].messages for output in group)
    assert len({str(group[0].messages) for group in groups}) > 6


def test_hidden_state_does_not_leak(example: Example, server: ServerProcess) -> None:
    """Before the end, games that answer a guess alike differ in nothing that a client can see."""
    seen: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    secrets = 24
    for seed in range(secrets):
        with OpenEnvWrapper(base_url=server.base_url) as env:
            observation, metadata = env.reset(seed=seed)
            result = env.step({"message": some_guess(example, random.Random(3))})
            if result.done:
                continue
            state = {key: value for key, value in env.state().items() if key not in {"seed", "episode_id"}}
            answers[str(result.observation["messages"])] += 1
            seen[str((observation, metadata, result, state))] += 1
    assert sorted(seen.values()) == sorted(answers.values())
    assert max(seen.values()) > 1, "some secrets answer alike"


async def test_limit_is_the_announced_one(example: Example, server: ServerProcess) -> None:
    """A player that always errs is stopped by the number of turns that TextArena states."""
    limit = 20 if example.name == "mastermind" else 10

    def one_good_one_bad(request: RolloutInferRequest, turn: int) -> str:
        return "Hm." if turn % 2 else some_guess(example, random.Random(turn))

    outputs = await play(example, server, one_good_one_bad, range(8))
    lost = [output for output in outputs if not output.rollout_infos["solved"]]
    assert lost
    assert {output.rollout_infos["num_turns"] for output in lost if output.stop_reason is StopReason.MAX_TURNS} == {
        limit
    }
