"""What a training run leaves behind: a table on the screen and a plot of the reward by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from examples.evaluation import Summary
from examples.example import Example

__all__ = ["comparison_table", "plot_rewards"]


def comparison_table(example: Example, before: Summary, after: Summary) -> Table:
    """How much was solved, what the example measures and each reward, before training and after."""
    summaries = (before, after)
    table = Table(title="held-out games")
    table.add_column("")
    for title, summary in (("before", before), ("after", after)):
        table.add_column(title + (f" ({summary.unscored} unscored)" if summary.unscored else ""), justify="right")
    table.add_row("games", *(str(summary.games) for summary in summaries))
    table.add_row("solved", *(_percent(summary.solved) for summary in summaries))
    for name, title in example.measures.items():
        table.add_row(title, *(_number(summary.measures[name]) for summary in summaries))
    for name in example.reward_names:
        table.add_row(name, *(_number(summary.rewards[name]) for summary in summaries))
    if not example.reward_names:
        table.add_row("reward", *(_number(summary.total_reward) for summary in summaries))
    return table


def plot_rewards(steps: Sequence[int], series: Mapping[str, Sequence[float | None]], path: Path) -> None:
    """Draw the total reward by training step and its components below it.

    Args:
        steps: Training steps, shape ``(n,)``.
        series: ``"total"`` and the components, each of shape ``(n,)``; None where a step had no scored game.
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
        points = [float("nan") if value is None else value for value in values]
        axes.plot(steps, points, marker="o", label=name)
    total.set_ylabel("total")
    parts.set_ylabel("components")
    parts.set_xlabel("step")
    parts.xaxis.get_major_locator().set_params(integer=True)
    if len(series) > 1:
        parts.legend(loc="best")
    for axes in (total, parts):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
