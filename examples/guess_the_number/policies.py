"""Players of GuessTheNumber without a model. They see what a model sees."""

from __future__ import annotations

import random
import re

from schedulers import Messages, RolloutInferRequest
from schedulers.engines.policies import policy_of

__all__ = ["POLICIES", "bisect", "random_legal"]


def bisect(request: RolloutInferRequest, turn: int) -> str:
    """Guess the middle of the range that is shown.

    Raises:
        ValueError: No range is shown.
    """
    low, high = _shown(request.messages)
    return f"[{(low + high) // 2}]"


def random_legal(messages: Messages, rng: random.Random) -> str:
    """Any number of the range that is shown.

    Raises:
        ValueError: No range is shown.
    """
    return f"[{rng.randint(*_shown(messages))}]"


def _shown(messages: Messages) -> tuple[int, int]:
    shown = re.search(r"between (\d+) and (\d+)\.$", messages[-1]["content"])
    if shown is None:
        raise ValueError(f"there is no range in {messages[-1]['content']!r}")
    return int(shown[1]), int(shown[2])


POLICIES = {"random": policy_of(random_legal), "solver": bisect}
