"""FrozenLake for the scripts that serve all games."""

from __future__ import annotations

from functools import partial

from examples.example import Example
from examples.frozen_lake.env import NAME
from examples.frozen_lake.policies import POLICIES
from schedulers import GYMScheduler

__all__ = ["EXAMPLE"]


EXAMPLE = Example(name=NAME, scheduler=partial(GYMScheduler, gym_env=NAME), policies=POLICIES)
