"""GuessTheNumber for the scripts that serve all games."""

from __future__ import annotations

import re

from examples.example import Example
from examples.guess_the_number.game import GuessTheNumberScheduler
from examples.guessing import GUESSING_REWARDS
from schedulers import RolloutInferRequest

__all__ = ["EXAMPLE", "bisect"]


def bisect(request: RolloutInferRequest, turn: int) -> str:
    """Guess the middle of the range that is shown.

    Raises:
        ValueError: No range is shown.
    """
    shown = re.search(r"between (\d+) and (\d+)\.$", request.messages[-1]["content"])
    if shown is None:
        raise ValueError(f"there is no range in {request.messages[-1]['content']!r}")
    return f"[{(int(shown[1]) + int(shown[2])) // 2}]"


EXAMPLE = Example(
    name="guess_the_number",
    scheduler=GuessTheNumberScheduler,
    policy=bisect,
    env_id="GuessTheNumber-v0",
    reward_names=GUESSING_REWARDS,
)
