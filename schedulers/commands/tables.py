"""What the commands show: a line of progress, the table of an evaluation, and the table of a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from schedulers.commands.results import Results
from schedulers.evaluation import Difference, Estimate, Summary

__all__ = ["comparison_table", "live", "summary_table"]


@contextlib.contextmanager
def live(console: Console, total: int) -> Iterator[Callable[[Results], None]]:
    """A bar with the means so far and the time that is left; where nobody watches, a line at each tenth of the games.

    Yields:
        What is to be called after every game.
    """
    columns = (TextColumn("games"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[means]}"))
    shown = Means()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total, means="")
        begun = False

        def update(results: Results) -> None:
            nonlocal begun
            means, done = shown.update(results), len(results.games)
            if not begun:  # games of an earlier run are not this one's speed
                progress.reset(task, total=total, completed=done - 1, means=means)
                begun = True
            progress.update(task, completed=done, means=means)
            if not console.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                console.print(f"{done}/{total} games: {means}{_time_left(results, total)}", highlight=False)

        yield update


class Means:
    """The means so far, kept up game by game."""

    def __init__(self) -> None:
        self._seen = self._scored = self._solved = 0
        self._tells_solved = False
        self._reward = 0.0

    def update(self, results: Results) -> str:
        """Take in what was added, and say it in a few words."""
        for game in results.games[self._seen :]:
            if game.error is None:
                self._scored += 1
                self._tells_solved |= "solved" in game.flags
                self._solved += game.flags.get("solved", False)
                self._reward += game.numbers["total_reward"]
        self._seen = len(results.games)
        unscored = f"{self._seen - self._scored} unscored" if self._seen > self._scored else ""
        if not self._scored:
            return unscored
        solved = f"solved {self._solved / self._scored:.0%}  " if self._tells_solved else ""
        return f"{solved}reward {self._reward / self._scored:.2f}  {unscored}".rstrip()


def summary_table(summary: Summary, *, title: str, games_per_minute: float | None) -> Table:
    """What an evaluation came to."""
    table = Table(title=title)
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("95% interval", justify="right")
    table.add_row("games", str(summary.games), "")
    for name, estimate in summary.shares.items():
        table.add_row(name, f"{estimate.value:.1%}", _interval(estimate, "{:.1%}"))
    for name, estimate in summary.means.items():
        table.add_row(_title(name), _number(estimate.value), _interval(estimate, "{:.3f}"))
    for reason, count in summary.stop_reasons.items():
        table.add_row(f"ended: {reason}", str(count), "")
    table.add_row("errors (unscored)", str(summary.unscored), "")
    for error, count in summary.errors.items():
        table.add_row(f"  {error}", str(count), "")
    if summary.recoveries:
        table.add_row("lost sessions replaced", str(summary.recoveries), "")
    if games_per_minute is not None:
        table.add_row("games per minute", f"{games_per_minute:.1f}", "")
    return table


def comparison_table(differences: Mapping[str, Difference], *, first: str, second: str) -> Table:
    """How two evaluations of the same games differ."""
    table = Table(title=f"{max(difference.change.count for difference in differences.values())} pairs of games")
    table.add_column("")
    for title in (first, second, "difference", "95% interval"):
        table.add_column(title, justify="right")
    for name, difference in differences.items():
        show, signed = ("{:.1%}", "{:+.1%}") if difference.is_share else ("{:.3f}", "{:+.3f}")
        values = (show.format(difference.first), show.format(difference.second))
        table.add_row(
            _title(name), *values, signed.format(difference.change.value), _interval(difference.change, signed)
        )
    return table


def _title(name: str) -> str:
    return name.replace("_", " ") if name.endswith("_seconds") or name == "total_reward" else name


def _number(value: float) -> str:
    return f"{value:.3f}"


def _interval(estimate: Estimate, number: str) -> str:
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"{number.format(estimate.low)} to {number.format(estimate.high)}"


def _time_left(results: Results, total: int) -> str:
    left = total - len(results.games)
    if left < 1 or not results.games_per_minute:
        return ""
    seconds = round(60 * left / results.games_per_minute)
    return f", about {seconds // 60}:{seconds % 60:02} left"
