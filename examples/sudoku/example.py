"""Sudoku for the scripts that serve all games."""

from __future__ import annotations

from pathlib import Path

from examples.example import Example
from examples.sudoku.board import Move, parse_board, solve
from examples.sudoku.hints import DIFFICULTIES
from examples.sudoku.rewards import REWARD_NAMES
from examples.sudoku.scheduler import SudokuScheduler
from schedulers import RolloutInferRequest

__all__ = ["EXAMPLE", "perfect"]


def perfect(request: RolloutInferRequest, turn: int) -> str:
    """Solve the board that is shown, which must have one solution, and fill its first empty cell.

    Raises:
        ValueError: No board is shown, or one without a solution.
    """
    board = parse_board(request.messages[-1]["content"])
    solution = None if board is None else solve(board)
    if board is None or solution is None:
        raise ValueError(f"there is no Sudoku to solve in {request.messages[-1]['content']!r}")
    cell = board.empty_cells[0]
    return str(Move(*cell, solution.number(cell)))


EXAMPLE = Example(
    name="sudoku",
    scheduler=SudokuScheduler,
    policy=perfect,
    env_id="Sudoku-v0-very-easy",
    reward_names=REWARD_NAMES,
    measures={"accepted_moves": "accepted moves a game"},
    difficulties=DIFFICULTIES,
    model=Path(__file__).with_name("policy"),
)
