"""A vLLM server takes over a trainer's weights, and tells exactly what it samples."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.token_drift import Recorder
from openenv_client.testing import MockEnvServer
from schedulers.engines import ContextOverflowError
from schedulers.engines.json_http import ServerError
from schedulers.engines.openai import OpenAIEngine
from schedulers.engines.vllm_server import VLLMServerWeights
from schedulers.types import RequestConfig, RolloutInferRequest
from tests.examples.sudoku.games import seeded
from tests.schedulers.exactness import assert_recorded_as_sampled, furthest_from_forward, play
from tests.vllm.models import changed, forward_logprobs

PROMPT = [5 + 3 * i % 400 for i in range(140)]  # longer than a block of the prefix cache


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - to 127.0.0.1
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        return json.loads(response.read())


def furthest(base_url: str, model: Any) -> float:
    """The largest difference between the server's log-probabilities and those of a forward pass."""
    choice = post(
        base_url + "/v1/completions",
        {
            "model": "policy", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, "logprobs": 0,
            "return_token_ids": True,
        },
    )["choices"][0]  # fmt: skip
    expected = forward_logprobs(model, PROMPT, choice["token_ids"])
    return float(max(abs(a - b) for a, b in zip(choice["logprobs"]["token_logprobs"], expected, strict=True)))


async def test_games_over_http_equal_a_forward_pass(vllm_server: str, bpe_policy: tuple[Path, Any, Any]) -> None:
    """Ids and mask exactly, log-probabilities to 1e-4; and a seed plays the same games again."""
    _, model, tokenizer = bpe_policy
    config = RequestConfig(max_tokens=16, seed=1)
    with MockEnvServer(seeded(3), capacity=64) as environment:
        async with OpenAIEngine(vllm_server, "policy", tokenizer=tokenizer) as engine:
            recorder = Recorder(engine)
            outputs = await play(recorder, environment.base_url, 60, config)
            again = await play(engine, environment.base_url, 4, config)
    assert engine.max_model_len == 4096
    assert [output.error for output in outputs] == [None] * 60
    for output in outputs:
        assert_recorded_as_sampled(output, recorder.turns[output.uuid])
    assert max(furthest_from_forward(model, output) for output in outputs) < 1e-4
    assert [output.messages for output in again] == [output.messages for output in outputs[:4]]


async def test_what_a_server_refuses_is_named(vllm_server: str, bpe_policy: tuple[Path, Any, Any]) -> None:
    """By a real one: another model, a prompt that is too long, with ids and with messages."""
    tokenizer = bpe_policy[2]
    config = RequestConfig(max_tokens=4, stop=("]",), top_k=3, seed=1)
    long = RolloutInferRequest(messages=[{"role": "user", "content": "[1 2" * 9000}])
    async with OpenAIEngine(vllm_server, "policy") as engine:
        response = await engine.infer_async(RolloutInferRequest(messages=[{"role": "user", "content": "hi"}]), config)
        assert response.choices[0].token_ids is None
        assert response.usage["completion_tokens"] > 0
        with pytest.raises(ContextOverflowError, match="maximum context length is 4096"):
            await engine.infer_async(long, config)
    async with OpenAIEngine(vllm_server, "policy", tokenizer=tokenizer, max_model_len=10**6) as engine:
        with pytest.raises(ContextOverflowError, match="maximum context length is 4096"):
            await engine.infer_async(long, config)
    for options in ({}, {"tokenizer": tokenizer}):
        async with OpenAIEngine(vllm_server, "policies", **options) as engine:
            with pytest.raises(ServerError, match="serves no model 'policies'; it has policy"):
                await engine.infer_async(long, config)


def test_a_server_samples_with_the_weights_it_was_given(vllm_server: str, bpe_policy: tuple[Path, Any, Any]) -> None:
    """The model's output layer is its embedding; the server holds a copy of it."""
    model = bpe_policy[1]
    assert furthest(vllm_server, model) < 1e-4
    weights = VLLMServerWeights(vllm_server + "/v1")
    for seed in (1, 2):
        other = changed(model, seed)
        weights.load_weights(other.state_dict())
        assert furthest(vllm_server, other) < 1e-4
        assert furthest(vllm_server, model) > 1e-3
