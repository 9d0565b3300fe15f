"""What a training run leaves behind: a plot of the reward by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["plot_rewards"]


def plot_rewards(steps: Sequence[int], series: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the total reward by training step and its components below it.

    Args:
        steps: Training steps, shape ``(n,)``.
        series: ``"total"`` and the components, each of shape ``(n,)``; NaN where a step had no scored game.
        path: The PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    total, parts = figure.subplots(2, 1, sharex=True)
    total.set_title("Reward by training step (mean over scored games)")
    for name, values in series.items():
        axes = total if name == "total" else parts
        axes.plot(steps, values, marker="o", label=name)
    total.set_ylabel("total")
    parts.set_ylabel("components")
    parts.set_xlabel("step")
    parts.xaxis.get_major_locator().set_params(integer=True)
    if len(series) > 1:
        parts.legend(loc="best")
    for axes in (total, parts):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
