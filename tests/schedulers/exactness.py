"""Games that are recorded as they pass by the engine, and what one forward pass says of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.spellings import boards, moves, teach
from benchmarks.token_drift import sampled_logprobs
from examples.sudoku.scheduler import SudokuScheduler
from schedulers import Episode, RequestConfig, RolloutOutput, Turn
from schedulers.engines import InferEngine

Passed = tuple[list[int], list[int]]
"""A prompt and the ids that were sampled."""


class Scheduler(SudokuScheduler):
    """Keeps the episodes, which have all turns of a trajectory that was split."""

    def __init__(self, engine: InferEngine) -> None:
        super().__init__(engine, 3, max_concurrent_envs=16)
        self.ended: dict[str, Episode] = {}

    async def on_trajectory_end(self, episode: Episode) -> None:
        self.ended[episode.uuid] = episode
        await super().on_trajectory_end(episode)


def rows(base_url: str, number: int) -> list[dict[str, Any]]:
    return [
        {"env_config": {"name": "openenv", "base_url": base_url, "reset_kwargs": {"seed": seed}}, "uuid": str(seed)}
        for seed in range(number)
    ]


async def play(engine: InferEngine, base_url: str, number: int, config: RequestConfig) -> list[RolloutOutput]:
    """Games of three turns at most."""
    async with Scheduler(engine) as scheduler:
        return await scheduler.async_infer(rows(base_url, number), config, use_tqdm=False)


def assert_recorded_as_sampled(output: RolloutOutput, turns: Sequence[Passed]) -> None:
    """The ids and the mask follow from the prompts and completions that passed through the engine."""
    last_prompt, last_ids = turns[-1]
    whole = last_prompt + last_ids
    mask = [0] * len(whole)
    for prompt, ids in turns:
        assert whole[: len(prompt) + len(ids)] == prompt + ids
        mask[len(prompt) : len(prompt) + len(ids)] = [1] * len(ids)
    first = len(turns[0][0])
    assert output.prompt_token_ids == whole[:first]
    assert output.completion_token_ids == whole[first:]
    assert output.completion_mask == mask[first:]
    assert output.response_token_ids is not None
    assert [ids for _, ids in turns] == [
        [token for token, m in zip(ids, masks, strict=True) if m]
        for ids, masks in zip(output.response_token_ids, output.response_loss_mask or [], strict=True)
    ]


def furthest_from_forward(model: Any, output: RolloutOutput) -> float:
    """The largest difference between recorded and recomputed log-probabilities of a trajectory's sampled tokens."""
    assert output.completion_logprobs is not None
    assert output.completion_mask is not None
    prompt, ids = output.prompt_token_ids or [], output.completion_token_ids or []
    places = [len(prompt) + place for place, sampled in enumerate(output.completion_mask) if sampled]
    expected = sampled_logprobs(model, prompt + ids, places)
    recorded = [output.completion_logprobs[place - len(prompt)] for place in places]
    return max(abs(a - b) for a, b in zip(recorded, expected, strict=True))


def furthest_of_segment(model: Any, segment: Sequence[Turn]) -> float:
    """The same of one segment of a trajectory that was split."""
    whole = [*(segment[-1].prompt_ids or ()), *(segment[-1].token_ids or ())]
    places: list[int] = []
    recorded: list[float] = []
    for turn in segment:
        prompt, ids = turn.prompt_ids or (), turn.token_ids or ()
        assert whole[: len(prompt) + len(ids)] == [*prompt, *ids]
        places += range(len(prompt), len(prompt) + len(ids))
        recorded += turn.logprobs or ()
    return max(abs(a - b) for a, b in zip(recorded, sampled_logprobs(model, whole, places), strict=True))


def assert_respelled(tokenizer: Any, games: Iterable[Sequence[Passed]]) -> None:
    """Where the tokenizer has merges, tokenising the texts again would lose what was sampled in many of these games."""
    if type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        drifted = [any(_respelled(tokenizer, ids) for _, ids in turns) for turns in games]
        assert sum(drifted) > len(drifted) / 4


def _respelled(tokenizer: Any, ids: Sequence[int]) -> bool:
    text = tokenizer.decode(ids, skip_special_tokens=True)
    again = tokenizer.encode(text, add_special_tokens=False)
    return bool(again != [token for token in ids if token != tokenizer.eos_token_id])


def make_talker(tokenizer: Any) -> Any:
    """A small model that says moves in words, in many spellings of a large vocabulary."""
    rng = random.Random(0)
    answers = [f"I play {move}" for move in moves(rng, 2000)]
    return teach(tokenizer, boards(rng, 8), answers, steps=100)  # a vocabulary like this makes them slow
