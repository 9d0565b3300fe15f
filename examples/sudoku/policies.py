"""Players of Sudoku without a model. They see what a model sees."""

from __future__ import annotations

import random
import re

from examples.sudoku.board import Board, Move, parse_board, solve
from examples.sudoku.hints import GUARANTEED_HEADER, OPTIONS_HEADER
from schedulers import Messages, RolloutInferRequest
from schedulers.engines.policies import policy_of

__all__ = ["POLICIES", "follow_hints", "perfect", "random_legal"]

_MOVE = re.compile(r"\[[1-9] [1-9] [1-9]\]")
_OPTION = re.compile(r"R([1-9]) C([1-9]): ([1-9](?: [1-9])*)")


def perfect(request: RolloutInferRequest, turn: int) -> str:
    """Solve the board that is shown, which must have one solution, and fill its first empty cell.

    Raises:
        ValueError: No board is shown, or one without a solution.
    """
    board = _shown(request.messages)
    solution = solve(board)
    if solution is None:
        raise ValueError(f"this Sudoku has no solution:\n{board}")
    cell = board.empty_cells[0]
    return str(Move(*cell, solution.number(cell)))


def random_legal(messages: Messages, rng: random.Random) -> str:
    """Any number that row, column and box allow, in any empty cell.

    Raises:
        ValueError: No board is shown, or one without such a move.
    """
    board = _shown(messages)
    moves = [Move(*cell, number) for cell in board.empty_cells for number in board.candidates(cell)]
    if not moves:
        raise ValueError(f"there is no legal move on this board:\n{board}")
    return str(rng.choice(moves))


def follow_hints(messages: Messages, rng: random.Random) -> str:
    """The first guaranteed move, else one of the fewest options that a cell has, else any legal move.

    Raises:
        ValueError: No board is shown, or one without a legal move.
    """
    text = messages[-1]["content"]
    guaranteed = _MOVE.search(_section(text, GUARANTEED_HEADER))
    if guaranteed is not None:
        return guaranteed[0]
    options = _OPTION.findall(_section(text, OPTIONS_HEADER))
    if not options:
        return random_legal(messages, rng)
    row, col, numbers = min(options, key=lambda option: len(option[2]))
    return f"[{row} {col} {rng.choice(numbers.split())}]"


def _shown(messages: Messages) -> Board:
    board = parse_board(messages[-1]["content"])
    if board is None:
        raise ValueError(f"there is no Sudoku in {messages[-1]['content']!r}")
    return board


def _section(text: str, header: str) -> str:
    """What stands under a header of the hints, up to the next blank line."""
    return text.partition(header)[2].partition("\n\n")[0]


POLICIES = {"random": policy_of(random_legal), "hints": policy_of(follow_hints), "solver": perfect}
