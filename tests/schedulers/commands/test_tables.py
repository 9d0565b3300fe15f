"""What the commands show."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from schedulers.commands.results import Results
from schedulers.commands.tables import comparison_table, live, summary_table
from schedulers.evaluation import Game, compare, summarise


def game(seed: int, *, reward: float | None = 1.0, solved: bool = True) -> Game:
    infos: dict[str, Any] = {"seed": seed, "stop_reason": "env_done", "total_reward": reward, "num_turns": 2}
    return Game.of(
        {"rollout_infos": {**infos, "solved": solved, "error": None if reward is not None else "SessionLost: x"}}
    )


def shown(*tables: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    for table in tables:
        console.print(table)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def watch(tmp_path: Path, games: list[Game], *, total: int, terminal: bool) -> str:
    output = io.StringIO()
    results = Results(tmp_path, {}, resume=False)
    with live(Console(file=output, force_terminal=terminal, width=100), total) as progress:
        for number, one in enumerate(games, 1):
            results.games.append(one)
            results.seconds = float(number)
            progress(results)
    return output.getvalue()


def test_terminal_sees_a_bar_with_means(tmp_path: Path) -> None:
    text = watch(tmp_path, [game(1), game(2, solved=False, reward=0.0), game(3, reward=None)], total=6, terminal=True)
    assert "3/6" in text
    assert "solved 50%  reward 0.50  1 unscored" in text


def test_log_file_gets_ten_lines_at_most(tmp_path: Path) -> None:
    """With the time that is left: one game a second, so far."""
    lines = watch(tmp_path, [game(seed) for seed in range(200)], total=200, terminal=False).splitlines()
    assert len(lines) == 10
    assert lines[0] == "20/200 games: solved 100%  reward 1.00, about 3:00 left"
    assert lines[-1] == "200/200 games: solved 100%  reward 1.00"


def test_games_of_which_none_is_scored_have_no_means(tmp_path: Path) -> None:
    [line] = watch(tmp_path, [game(1, reward=None)], total=1, terminal=False).splitlines()
    assert line == "1/1 games: 1 unscored"


def test_table_of_one_game_has_no_interval_of_a_mean() -> None:
    text = shown(summary_table(summarise([game(1)]), title="t", games_per_minute=None))
    assert "│ total reward      │  1.000 │               - │" in text
    assert "games per minute" not in text


def test_table_of_nothing_scored_says_so() -> None:
    text = shown(summary_table(summarise([game(1, reward=None)] * 3), title="t", games_per_minute=2.5))
    assert "│ errors (unscored) │     3 │" in text
    assert "│   SessionLost     │     3 │" in text


def test_comparison_has_signs() -> None:
    differences = compare([game(1), game(2)], [game(1, solved=False, reward=0.5), game(2)])
    text = shown(comparison_table(differences, first="A", second="B"))
    assert "2 pairs of games" in text
    assert "-50.0%" in text
    assert "-0.250" in text
