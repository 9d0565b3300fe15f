"""Sudoku for the scripts that serve all games."""

from __future__ import annotations

from pathlib import Path

from examples.example import Example
from examples.sudoku.hints import DIFFICULTIES
from examples.sudoku.policies import POLICIES, perfect
from examples.sudoku.rewards import REWARD_NAMES
from examples.sudoku.scheduler import SudokuScheduler

__all__ = ["EXAMPLE", "perfect"]


EXAMPLE = Example(
    name="sudoku",
    scheduler=SudokuScheduler,
    policies=POLICIES,
    env_id="Sudoku-v0-very-easy",
    reward_names=REWARD_NAMES,
    measures=("accepted_moves",),
    difficulties=DIFFICULTIES,
    model=Path(__file__).with_name("policy"),
)
