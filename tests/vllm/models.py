"""Small models for vLLM, and what a plain forward pass of transformers says of their tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from schedulers import RolloutOutput
from schedulers.engines.vllm import VLLMEngine

POLICY = Path(__file__).parents[2] / "examples" / "sudoku" / "policy"
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28, "max_num_seqs": 64}


def start(folder: Path, *, asynchronous: bool = False, **arguments: Any) -> VLLMEngine:
    """Start vLLM on the CPU with what a test needs."""
    options = OPTIONS if asynchronous else {**OPTIONS, "distributed_executor_backend": "uni"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports when it starts
        return VLLMEngine.from_pretrained(
            folder, dtype="float32", asynchronous=asynchronous, options=options, **arguments
        )


def forward(model: Any, ids: Sequence[int]) -> Any:
    """The log-probabilities of every token that could follow, shape ``(length, vocabulary)``; no cache, no batch."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


def forward_logprobs(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Those of ``ids`` behind ``prompt``."""
    logprobs = forward(model, [*prompt, *ids])[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logprobs, ids, strict=True)]


def changed(model: Any, seed: int) -> Any:
    """A copy of the model after what might have been an optimizer's step."""
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return other.eval()


def by_place(rollout_infos: list[Any], **_: Any) -> list[float]:
    """Rewards that always differ, so that every step changes the weights."""
    return [float(place) for place in range(len(rollout_infos))]


def recorded(record: Mapping[str, Any]) -> RolloutOutput:
    """What a forward pass can be compared with of a trajectory in a file."""
    names = ("prompt_token_ids", "completion_token_ids", "completion_mask", "completion_logprobs")
    return RolloutOutput(None, [], **{name: record[name] for name in names})
