"""Play a policy on fixed games and say how well it did."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.example import BASE_URL, Example
from schedulers import RequestConfig, RolloutOutput, RolloutScheduler

__all__ = ["Summary", "play", "summarise"]


@dataclass(frozen=True)
class Summary:
    """Means over scored games; None where there is none.

    Args:
        games: How many were scored.
        unscored: How many were not, because their environment failed.
        solved: The share that was solved, 0 to 1.
        turns: Turns a game.
        total_reward: The reward of a game.
        rewards: Each reward component.
        measures: Each of the example's measures.
        stop_reasons: How many games ended for which reason, unscored ones included.
    """

    games: int
    unscored: int
    solved: float | None
    turns: float | None
    total_reward: float | None
    rewards: dict[str, float | None]
    measures: dict[str, float | None]
    stop_reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def play(
    example: Example,
    scheduler: RolloutScheduler,
    seeds: Sequence[int],
    *,
    base_url: str | None,
    request_config: RequestConfig,
) -> list[RolloutOutput]:
    """Play one game for each seed, all at once, with a progress bar.

    Args:
        example: The game.
        scheduler: Plays it.
        seeds: Name the games.
        base_url: The server, for a game that has one.
        request_config: How to sample.

    Returns:
        The outputs, in the order of the seeds.
    """
    rows = [example.row(seed, base_url=base_url or BASE_URL) for seed in seeds]
    return await scheduler.async_infer(rows, request_config)


def summarise(example: Example, outputs: Sequence[RolloutOutput]) -> Summary:
    """The means of finished games."""
    scored = [output.rollout_infos for output in outputs if output.total_reward is not None]
    return Summary(
        games=len(scored),
        unscored=len(outputs) - len(scored),
        solved=_mean(infos.get("solved", False) for infos in scored),
        turns=_mean(infos["num_turns"] for infos in scored),
        total_reward=_mean(infos["total_reward"] for infos in scored),
        rewards={name: _mean(infos["rewards"][name] for infos in scored) for name in example.reward_names},
        measures={name: _mean(infos.get(name, 0) for infos in scored) for name in example.measures},
        stop_reasons=dict(Counter(output.rollout_infos["stop_reason"] for output in outputs).most_common()),
    )


def _mean(values: Iterable[float]) -> float | None:
    numbers = [float(value) for value in values]
    return statistics.fmean(numbers) if numbers else None
