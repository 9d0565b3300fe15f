"""Sudoku for the mock server: the rules and the frames of our own environment, without TextArena."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

from examples.sudoku.board import Board, Move, random_puzzle
from examples.sudoku.moves import parse_move
from openenv_client.testing import reply

Frames = Generator[dict[str, Any], dict[str, Any], None]


def frame(board: Board, *texts: str, refused: str | None = None) -> dict[str, Any]:
    """An observation with what is new in it."""
    messages = [{"sender_id": 0 if t.startswith("[") else -1, "content": t, "category": ""} for t in texts]
    rows = [list(row) for row in board.rows]
    return {"prompt": "", "messages": messages, "board": rows, "solved": board.is_solved, "refused": refused}


def sudoku(puzzle: Board, solution: Board) -> Callable[[dict[str, Any]], Frames]:
    """The game as TextArena plays it: one move that is not the solution's is forgiven, a second in a row loses."""

    def game(reset_kwargs: dict[str, Any]) -> Frames:
        board, warned = puzzle, False
        action = yield reply(frame(board, "Rules", "Game Board:\n" + board.render()), reward=0.0)
        while True:
            move = parse_move(action["message"]).move
            said = action["message"]
            if move is not None and move.in_range and not board.number(move.cell):
                right = solution.number(move.cell) == move.number
            else:
                right = False
            if right and move is not None:
                board, warned = board.place(move), False
                won = board.is_solved
                answer = frame(board, said, "Board state: \n" + board.render())
                action = yield reply(answer, reward=float(won), done=won)
            elif not warned:
                warned = True
                answer = frame(board, said, "You attempted an invalid move.", refused="Invalid move.")
                action = yield reply(answer, reward=0.0)
            else:
                share = (board.filled - puzzle.filled) / (81 - puzzle.filled)
                action = yield reply(frame(board, said, refused="Invalid move."), reward=share, done=True)

    return game


def seeded(empty: int) -> Callable[[dict[str, Any]], Frames]:
    """A server's script: the puzzle follows from the seed."""
    return lambda kwargs: sudoku(*random_puzzle(random.Random(kwargs.get("seed")), empty=empty))(kwargs)


def right_moves(puzzle: Board, solution: Board) -> list[Move]:
    return [Move(*cell, solution.number(cell)) for cell in puzzle.empty_cells]


def wrong_move(puzzle: Board, solution: Board, index: int = 0) -> Move:
    """A move into an empty cell that is not the solution's."""
    cell = puzzle.empty_cells[index]
    return Move(*cell, solution.number(cell) % 9 + 1)
