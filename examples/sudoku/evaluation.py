"""Play a policy on fixed puzzles and say how well it did."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.sudoku.rewards import REWARD_NAMES
from schedulers import RequestConfig, RolloutInferRequest, RolloutOutput, RolloutScheduler

__all__ = ["Summary", "play", "summarise"]


@dataclass(frozen=True)
class Summary:
    """Means over scored games.

    Args:
        games: How many were scored.
        unscored: How many were not, because their environment failed.
        solved: The share that was solved, 0 to 1; None without a scored game, as are the next three.
        accepted_moves: Accepted moves a game.
        turns: Turns a game.
        rewards: Each reward component.
        stop_reasons: How many games ended for which reason, unscored ones included.
    """

    games: int
    unscored: int
    solved: float | None
    accepted_moves: float | None
    turns: float | None
    rewards: dict[str, float | None]
    stop_reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def play(
    scheduler: RolloutScheduler, seeds: Sequence[int], *, base_url: str, request_config: RequestConfig
) -> list[RolloutOutput]:
    """Play one game for each seed, all at once, with a progress bar.

    Returns:
        The outputs, in the order of the seeds.
    """
    config = {"name": "openenv", "base_url": base_url}
    requests = [
        RolloutInferRequest(data_dict={"env_config": {**config, "reset_kwargs": {"seed": seed}}}) for seed in seeds
    ]
    return await scheduler.async_infer(requests, request_config)


def summarise(outputs: Sequence[RolloutOutput]) -> Summary:
    """The means of finished games."""
    scored = [output.rollout_infos for output in outputs if output.total_reward is not None]
    return Summary(
        games=len(scored),
        unscored=len(outputs) - len(scored),
        solved=_mean([float(infos.get("solved", False)) for infos in scored]),
        accepted_moves=_mean([float(infos.get("accepted_moves", 0)) for infos in scored]),
        turns=_mean([float(infos["num_turns"]) for infos in scored]),
        rewards={name: _mean([infos["rewards"][name] for infos in scored]) for name in REWARD_NAMES},
        stop_reasons=dict(Counter(output.rollout_infos["stop_reason"] for output in outputs).most_common()),
    )


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
