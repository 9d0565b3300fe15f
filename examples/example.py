"""What the scripts of this folder need to know of a game, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedulers import RolloutScheduler
from schedulers.engines.policies import Policy
from schedulers.evaluation import HELD_OUT_SEED

__all__ = ["BASE_URL", "Example"]

BASE_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One game of this folder.

    Every game reports ``rollout_infos["solved"]``: whether the trajectory won.

    Args:
        name: Of its folder, its dataset and, when it runs in this process, its environment.
        scheduler: What plays it, under a name of its own in ``multi_turns``.
        policies: Players by name that see what a model sees; each can be the script of a ``ScriptedEngine``. There are
            at least ``random``, which plays any legal move, and ``solver``, which wins.
        env_id: What the environment server has to play; None when the environment lives in this process.
        reward_names: The components in ``rollout_infos["rewards"]``; none when there is only the total.
        measures: Numbers in ``rollout_infos`` that tell how well it is played.
        difficulties: What the scheduler's option ``difficulty`` takes; none when it has no such option.
        model: A small policy that comes with the example.
        held_out_seed: The first seed for evaluation.
    """

    name: str
    scheduler: type[RolloutScheduler]
    policies: Mapping[str, Policy]
    env_id: str | None = None
    reward_names: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    difficulties: tuple[str, ...] = ()
    model: Path | None = None
    held_out_seed: int = HELD_OUT_SEED

    @property
    def policy(self) -> Policy:
        """The reference player."""
        return self.policies["solver"]

    @property
    def dataset(self) -> Path:
        """The training games that come with the example, one row for each seed."""
        return Path(__file__).parent / self.name / f"{self.name}.jsonl"

    def row(self, seed: int, *, base_url: str = BASE_URL) -> dict[str, Any]:
        """The dataset's row for the game of a seed.

        Args:
            seed: Names the game.
            base_url: Where the server is, for games that have one.
        """
        env_config: dict[str, Any] = {"name": self.name, "seed": seed}
        if self.env_id is not None:
            env_config = {"name": "openenv", "base_url": base_url, "reset_kwargs": {"seed": seed}}
        return {"messages": [{"role": "user", "content": "Play"}], "env_config": env_config}
