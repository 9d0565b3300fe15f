"""Mathematics for the scripts that serve all games."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from examples.example import BASE_URL, Example
from examples.maths.env import NAME
from examples.maths.problems import random_problem, solve
from schedulers import GYMScheduler, RolloutInferRequest

__all__ = ["EXAMPLE", "perfect"]


def perfect(request: RolloutInferRequest, turn: int) -> str:
    """Solve the question that was asked.

    Raises:
        ValueError: It is none that ``random_problem`` asks.
    """
    question = next(message["content"] for message in request.messages if message["role"] == "user")
    return f"The answer is \\boxed{{{solve(question)}}}."


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


EXAMPLE = MathsExample(name="maths", scheduler=partial(GYMScheduler, gym_env=NAME), policy=perfect)
