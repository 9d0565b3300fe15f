"""All words that a Sudoku player reads: the rules once, then a board with hints in every turn. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from examples.sudoku.board import Board, Move
from examples.sudoku.hints import Difficulty, TriedMove, build_hints

__all__ = ["FORMAT_REMINDER", "SYSTEM_PROMPT", "refusal", "render_turn"]

SYSTEM_PROMPT = """\
You are playing Sudoku, one move per turn.

Goal: fill every empty cell ('.') so that each row, each column and each 3x3 box holds the digits 1 to 9 once.

Answer with exactly one move, [row column number], and nothing else. Rows and columns are numbered 1 to 9 from the \
top left. To put a 7 into row 5, column 3, answer:
[5 3 7]

Rules:
- Only fill empty cells; a filled cell cannot be changed.
- A move that is not part of the solution is refused. Two refused moves in a row lose the game.

Each turn shows the board, and may list moves already tried (do not repeat them), guaranteed moves (certainly right: \
play one of them) and other options (the numbers that a cell may still take)."""

FORMAT_REMINDER = "No move found. Answer with [row column number], for example [5 3 7]."
"""Feedback after an answer without a move."""

FILLED = "the cell is filled."
WRONG = "not part of the solution."
OUT_OF_RANGE = "row, column and number go from 1 to 9."


def refusal(board: Board, move: Move) -> str:
    """Feedback after a refused move: one line that names the move and why it was refused.

    Args:
        board: The board that the move was refused on.
        move: What the player tried.
    """
    if not move.in_range:
        return f"{move} refused: {OUT_OF_RANGE}"
    return f"{move} refused: {FILLED if board.number(move.cell) else WRONG}"


def render_turn(
    board: Board, tried: Sequence[TriedMove] = (), difficulty: Difficulty = "easy", feedback: str | None = None
) -> str:
    """The user's message of one turn.

    Args:
        board: The board as it is now.
        tried: All moves of the game so far, in the order of play.
        difficulty: How many hints to give.
        feedback: One line about the last answer, when something was wrong with it.

    Raises:
        ValueError: No such difficulty.
    """
    hints = build_hints(board, tried, difficulty=difficulty).render()
    text = f"{feedback}\n{board.render()}" if feedback else board.render()
    return f"{text}\n\n{hints}" if hints else text
