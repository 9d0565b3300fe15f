"""Whole games: what is recorded is what was sampled, and what a forward pass of transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.token_drift import Recorder
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.testing import MockEnvServer
from schedulers import Env, GYMScheduler, envs, run_multi_turn
from schedulers.engines.transformers import TransformersEngine
from schedulers.engines.vllm import VLLMEngine
from schedulers.lockstep import rollout_fn_of
from schedulers.types import Messages, RequestConfig, RolloutInferRequest
from tests.examples.sudoku.games import seeded
from tests.schedulers.exactness import (
    assert_recorded_as_sampled,
    assert_respelled,
    furthest_from_forward,
    make_talker,
    play,
    rows,
)
from tests.vllm.models import POLICY, forward, start

GAMES = 200


@pytest.fixture(scope="module")
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(seeded(3), capacity=GAMES) as server:
        yield server


@pytest.fixture(scope="module")
def policy() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(POLICY).eval()


@pytest.fixture(scope="session")
def talker(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLMEngine, Any]]:
    """SmolLM2's tokenizer, and a small model; open to the end, since vLLM closes all engines of a process with one."""
    folder = tmp_path_factory.mktemp("talker")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = make_talker(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with start(folder) as engine:
        yield engine, model


@pytest.fixture(params=["embedded", "bpe", pytest.param("talker", marks=pytest.mark.smollm2)])
def player(request: pytest.FixtureRequest) -> tuple[VLLMEngine, Any]:
    """An engine, and its model in transformers, with tokenizers of different kinds."""
    if request.param == "embedded":
        return request.getfixturevalue("policy_engine"), request.getfixturevalue("policy")
    if request.param == "bpe":
        return request.getfixturevalue("batched"), request.getfixturevalue("bpe_policy")[1]
    made: tuple[VLLMEngine, Any] = request.getfixturevalue("talker")
    return made


async def test_200_games_equal_a_forward_pass(player: tuple[VLLMEngine, Any], server: MockEnvServer) -> None:
    """T01, T03, T04, T07, T08: ids and mask exactly, log-probabilities to 1e-4, at their places."""
    engine, model = player
    recorder = Recorder(engine)
    outputs = await play(recorder, server.base_url, GAMES, RequestConfig(max_tokens=24, seed=1))
    assert [output.error for output in outputs] == [None] * GAMES
    for output in outputs:
        assert_recorded_as_sampled(output, recorder.turns[output.uuid])
    assert max(furthest_from_forward(model, output) for output in outputs) < 1e-4
    assert max(len(turns) for turns in recorder.turns.values()) > 1
    assert_respelled(engine.tokenizer, recorder.turns.values())


async def test_greedy_ids_are_the_likeliest_of_a_forward_pass(
    policy_engine: VLLMEngine, policy: Any, server: MockEnvServer
) -> None:
    outputs = await play(policy_engine, server.base_url, 50, RequestConfig(max_tokens=16, temperature=0))
    for output in outputs:
        prompt, ids = output.prompt_token_ids or [], output.completion_token_ids or []
        likeliest = forward(policy, prompt + ids)[len(prompt) - 1 : -1].argmax(-1)
        sampled = torch.tensor(output.completion_mask, dtype=torch.bool)
        assert torch.equal(likeliest[sampled], torch.tensor(ids)[sampled])


def test_all_ways_of_sampling_play_the_same_greedy_games(
    batched: VLLMEngine, asynchronous: VLLMEngine, bpe_policy: tuple[Path, Any, Any], server: MockEnvServer
) -> None:
    """Batch by batch, each at its own pace in ``LLM`` and ``AsyncLLM``, and with transformers."""
    config = RequestConfig(max_tokens=16, temperature=0)
    expected = asyncio.run(play(TransformersEngine(*bpe_policy[1:]), server.base_url, 24, config))
    scheduler = SudokuScheduler(None, max_turns=3, max_concurrent_envs=16, tokenizer=batched.tokenizer)
    requests = [RolloutInferRequest.from_row(row) for row in rows(server.base_url, 24)]
    in_lockstep = run_multi_turn(requests, None, scheduler, rollout_fn_of(batched), config)
    asyncio.run(scheduler.aclose())
    others = [in_lockstep, *(asyncio.run(play(e, server.base_url, 24, config)) for e in (batched, asynchronous))]
    for outputs in others:
        for output, other in zip(outputs, expected, strict=True):
            assert output.messages == other.messages
            assert output.completion_token_ids == other.completion_token_ids
            assert output.completion_mask == other.completion_mask
            assert output.completion_logprobs == pytest.approx(other.completion_logprobs, abs=1e-4)


class Gate(Env):
    """An environment whose first game answers its first move only when all other games are over."""

    games = 0
    over: asyncio.Event

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        self.turn = 0
        return "Say a move.", {}, ""

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        if self.turn == 1 and self.env_config["number"] == 0:
            await Gate.over.wait()
        return "Say another one.", 1.0, self.turn == 3, {}

    async def close(self) -> None:
        Gate.games -= 1
        if Gate.games == 1:
            Gate.over.set()


async def test_a_trajectory_that_waits_for_its_environment_holds_up_no_other(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it did, this would never end."""
    monkeypatch.setitem(envs, "gate", Gate)
    Gate.games, Gate.over = 16, asyncio.Event()
    requests = [{"env_config": {"name": "gate", "number": number}, "uuid": str(number)} for number in range(16)]
    async with GYMScheduler(engine) as scheduler:
        outputs = await scheduler.async_infer(requests, RequestConfig(max_tokens=256), use_tqdm=False)
    assert [output.rollout_infos["num_turns"] for output in outputs] == [3] * 16
