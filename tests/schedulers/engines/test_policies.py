from __future__ import annotations

import random

from schedulers import Messages, RolloutInferRequest
from schedulers.engines.policies import policy_of


def number(messages: Messages, rng: random.Random) -> str:
    return f"{messages[-1]['content']} {rng.random()}"


def request(*texts: str, seed: int = 0) -> RolloutInferRequest:
    messages = [{"role": "user", "content": text} for text in texts]
    return RolloutInferRequest(messages=messages, data_dict={"env_config": {"seed": seed}})


def test_the_same_conversation_is_answered_the_same_way() -> None:
    """Whatever the request is called, and however often it was asked."""
    policy = policy_of(number)
    assert policy(request("a"), 0) == policy(request("a", seed=1), 0) == policy_of(number)(request("a"), 0)


def test_every_turn_and_every_game_has_chance_of_its_own() -> None:
    policy = policy_of(number)
    drawn = [policy(request(*texts), 0).split()[-1] for texts in (["a"], ["b"], ["a", "b"], ["b", "a"], ["\ud83d"])]
    assert len(set(drawn)) == len(drawn)


def test_another_seed_plays_other_games() -> None:
    assert policy_of(number, seed=1)(request("a"), 0) != policy_of(number, seed=2)(request("a"), 0)


def test_the_processes_own_chance_has_no_part_in_it() -> None:
    random.seed(0)
    state = random.getstate()
    policy_of(number)(request("a"), 0)
    assert random.getstate() == state
