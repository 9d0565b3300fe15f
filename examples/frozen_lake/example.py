"""FrozenLake for the scripts that serve all games."""

from __future__ import annotations

from examples.example import Example
from examples.frozen_lake.env import NAME
from examples.frozen_lake.policies import POLICIES
from schedulers import GYMScheduler

__all__ = ["EXAMPLE"]


EXAMPLE = Example(name=NAME, scheduler=GYMScheduler, policies=POLICIES)
