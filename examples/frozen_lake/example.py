"""FrozenLake for the scripts that serve all games."""

from __future__ import annotations

from functools import partial

from examples.example import Example
from examples.frozen_lake.env import NAME
from examples.frozen_lake.lake import parse_lake
from schedulers import GYMScheduler, RolloutInferRequest

__all__ = ["EXAMPLE", "perfect"]


def perfect(request: RolloutInferRequest, turn: int) -> str:
    """Take the next step of a shortest way over the map that is shown.

    Raises:
        ValueError: No map is shown, or one without a way to the goal.
    """
    seen = parse_lake(request.messages[-1]["content"])
    if seen is None:
        raise ValueError(f"there is no lake in {request.messages[-1]['content']!r}")
    lake, player = seen
    return f"<action>{lake.path(player)[0]}</action>"


EXAMPLE = Example(name=NAME, scheduler=partial(GYMScheduler, gym_env=NAME), policy=perfect)
