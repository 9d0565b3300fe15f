"""GuessTheNumber for the scripts that serve all games."""

from __future__ import annotations

from examples.example import Example
from examples.guess_the_number.game import GuessTheNumberScheduler
from examples.guess_the_number.policies import POLICIES
from examples.guessing import GUESSING_REWARDS

__all__ = ["EXAMPLE"]


EXAMPLE = Example(
    name="guess_the_number",
    scheduler=GuessTheNumberScheduler,
    policies=POLICIES,
    env_id="GuessTheNumber-v0",
    reward_names=GUESSING_REWARDS,
)
