"""Scripted players on the example's problems."""

from __future__ import annotations

import json

from examples.maths.example import EXAMPLE
from schedulers import MathTipsScheduler, RequestConfig, RolloutInferRequest, StopReason
from schedulers.engines import ScriptedEngine

ROWS = [EXAMPLE.row(EXAMPLE.held_out_seed + number) for number in range(32)]


def careless(request: RolloutInferRequest, turn: int) -> str:
    """Right from the second answer on."""
    return EXAMPLE.policy(request, turn) if turn else "\\boxed{1/1000}"


async def test_perfect_player_solves_all() -> None:
    outputs = await EXAMPLE.scheduler(ScriptedEngine(EXAMPLE.policy)).async_infer(ROWS)
    assert [output.total_reward for output in outputs] == [1.0] * 32
    assert all(output.rollout_infos["solved"] for output in outputs)
    assert {output.stop_reason for output in outputs} == {StopReason.ENV_DONE}


async def test_careless_player_needs_a_second_attempt() -> None:
    for attempts, reward in ((1, 0.0), (2, 1.0)):
        rows = [{**row, "env_config": {**row["env_config"], "attempts": attempts}} for row in ROWS]
        outputs = await EXAMPLE.scheduler(ScriptedEngine(careless)).async_infer(rows)
        assert [output.total_reward for output in outputs] == [reward] * 32


async def test_the_same_rows_serve_the_schedulers_of_tips() -> None:
    outputs = await MathTipsScheduler(ScriptedEngine(careless)).async_infer(ROWS, RequestConfig())
    assert [output.rollout_infos["step_rewards"] for output in outputs] == [[0.0, 1.0]] * 32


def test_dataset_is_the_rows_of_the_first_seeds() -> None:
    rows = [json.loads(line) for line in EXAMPLE.dataset.read_text(encoding="utf-8").splitlines()]
    assert rows == [EXAMPLE.row(seed) for seed in range(256)]
