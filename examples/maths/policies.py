"""Players of mathematics without a model. They see what a model sees."""

from __future__ import annotations

import random

from examples.maths.problems import solve
from schedulers import Messages, RolloutInferRequest
from schedulers.engines.policies import policy_of

__all__ = ["POLICIES", "perfect", "random_legal"]


def perfect(request: RolloutInferRequest, turn: int) -> str:
    """Solve the question that was asked.

    Raises:
        ValueError: It is none that ``random_problem`` asks.
    """
    question = next(message["content"] for message in request.messages if message["role"] == "user")
    return f"The answer is \\boxed{{{solve(question)}}}."


def random_legal(messages: Messages, rng: random.Random) -> str:
    """Some small whole number, in the form that is asked for."""
    return f"The answer is \\boxed{{{rng.randint(-12, 100)}}}."


POLICIES = {"random": policy_of(random_legal), "solver": perfect}
