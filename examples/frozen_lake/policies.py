"""Players of the frozen lake without a model. They see what a model sees."""

from __future__ import annotations

import random

from examples.frozen_lake.lake import DIRECTIONS, Cell, Lake, parse_lake
from schedulers import Messages, RolloutInferRequest
from schedulers.engines.policies import policy_of

__all__ = ["POLICIES", "perfect", "random_legal"]


def perfect(request: RolloutInferRequest, turn: int) -> str:
    """Take the next step of a shortest way over the map that is shown.

    Raises:
        ValueError: No map is shown, or one without a way to the goal.
    """
    lake, player = _shown(request.messages)
    return f"<action>{lake.path(player)[0]}</action>"


def random_legal(messages: Messages, rng: random.Random) -> str:
    """Any step that stays on the map, into a hole or not.

    Raises:
        ValueError: No map is shown.
    """
    lake, player = _shown(messages)
    steps = [direction for direction in DIRECTIONS if lake.move(player, direction) != player]
    return f"<action>{rng.choice(steps)}</action>"


def _shown(messages: Messages) -> tuple[Lake, Cell]:
    seen = parse_lake(messages[-1]["content"])
    if seen is None:
        raise ValueError(f"there is no lake in {messages[-1]['content']!r}")
    return seen


POLICIES = {"random": policy_of(random_legal), "solver": perfect}
