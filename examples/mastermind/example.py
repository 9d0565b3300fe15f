"""Mastermind for the scripts that serve all games."""

from __future__ import annotations

from examples.example import Example
from examples.guessing import GUESSING_REWARDS
from examples.mastermind.game import MastermindScheduler
from examples.mastermind.policies import POLICIES

__all__ = ["EXAMPLE"]


EXAMPLE = Example(
    name="mastermind",
    scheduler=MastermindScheduler,
    policies=POLICIES,
    env_id="Mastermind-v0",
    reward_names=GUESSING_REWARDS,
)
