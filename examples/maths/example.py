"""Mathematics for the scripts that serve all games."""

from __future__ import annotations

import random
from typing import Any

from examples.example import BASE_URL, Example
from examples.maths.env import NAME
from examples.maths.policies import POLICIES
from examples.maths.problems import random_problem
from schedulers import GYMScheduler

__all__ = ["EXAMPLE", "MathsExample"]


class MathsExample(Example):
    """The seed of a row stands for a question, which is in the row itself."""

    def row(self, seed: int, *, base_url: str = BASE_URL) -> dict[str, Any]:
        """The row with the question of a seed."""
        problem = random_problem(random.Random(seed))
        return {
            "messages": [{"role": "user", "content": problem.question}],
            "env_config": {"name": NAME, "question": problem.question, "answer": problem.answer},
            "solution": problem.answer,
        }


EXAMPLE = MathsExample(name="maths", scheduler=GYMScheduler, policies=POLICIES)
